"""ZeRO stages 0 to 3 as policies over one core. Start reading in `drivetrain.zero.api`."""

from __future__ import annotations

from drivetrain.zero.access import ParameterAccess, Quantity
from drivetrain.zero.adopt import Adopted, adopt
from drivetrain.zero.api import ModelStateBytes, ShardedModule, shard
from drivetrain.zero.build import Init, whole
from drivetrain.zero.codec import INT4_GRADIENTS, INT8_WEIGHTS
from drivetrain.zero.compiled import CompiledModule, CompileOptions, CompileReport, compile_sharded
from drivetrain.zero.early import EarlyUpdates, StepPolicy
from drivetrain.zero.gathering import gathered, resident
from drivetrain.zero.gathers import Synchronous
from drivetrain.zero.leaf import LeafRule
from drivetrain.zero.moving import move_states, return_states, state_kinds
from drivetrain.zero.optimizer import NonFiniteGradientError, ShardedOptimizer, StepResult
from drivetrain.zero.parking import StateKind
from drivetrain.zero.policy import ErrorFeedback, Policy
from drivetrain.zero.precision import LossScalePolicy, LossScaler
from drivetrain.zero.state import FlatSlice
from drivetrain.zero.store import ShardStore, Stores
from drivetrain.zero.tiled import TiledLinear
from drivetrain.zero.values import TensorSource
from drivetrain.zero.wire import AUTOCAST_CLASSES, WireRule

__all__ = [
    "AUTOCAST_CLASSES",
    "INT4_GRADIENTS",
    "INT8_WEIGHTS",
    "Adopted",
    "CompileOptions",
    "CompileReport",
    "CompiledModule",
    "EarlyUpdates",
    "ErrorFeedback",
    "FlatSlice",
    "Init",
    "LeafRule",
    "LossScalePolicy",
    "LossScaler",
    "ModelStateBytes",
    "NonFiniteGradientError",
    "ParameterAccess",
    "Policy",
    "Quantity",
    "ShardStore",
    "ShardedModule",
    "ShardedOptimizer",
    "StateKind",
    "StepPolicy",
    "StepResult",
    "Stores",
    "Synchronous",
    "TensorSource",
    "TiledLinear",
    "WireRule",
    "adopt",
    "compile_sharded",
    "gathered",
    "move_states",
    "resident",
    "return_states",
    "shard",
    "state_kinds",
    "whole",
]
