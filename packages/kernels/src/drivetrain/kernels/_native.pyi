"""Types of the native module; csrc/bindings.cpp defines it."""

class Operands:
    def __init__(
        self,
        *,
        counts: list[int],
        streams: list[tuple[list[int], list[int]]],
        copy: tuple[list[int], list[int]],
    ) -> None: ...

class AdamStep:
    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        correction1: float,
        correction2: float,
        decoupled: bool,
        factor: float,
    ) -> None: ...

class LionStep:
    def __init__(self, *, lr: float, beta1: float, beta2: float, weight_decay: float, factor: float) -> None: ...

class LambStep:
    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        correction1: float,
        correction2: float,
        eps_inside_sqrt: bool,
        factor: float,
    ) -> None: ...

class AdagradStep:
    def __init__(self, *, lr: float, eps: float, weight_decay: float, factor: float) -> None: ...

class SgdStep:
    def __init__(
        self,
        *,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        first: bool,
        factor: float,
    ) -> None: ...

def usable_instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def choose_instruction_set(name: str) -> None: ...
def thread_setting() -> int: ...
def set_threads(threads: int) -> None: ...
def adam_step(step: AdamStep, operands: Operands, threads: int) -> None: ...
def adam_rollback(step: AdamStep, operands: Operands, threads: int) -> None: ...
def lion_step(step: LionStep, operands: Operands, threads: int) -> None: ...
def adagrad_step(step: AdagradStep, operands: Operands, threads: int) -> None: ...
def sgd_step(step: SgdStep, operands: Operands, threads: int) -> None: ...
def lamb_moments(step: LambStep, operands: Operands, threads: int) -> list[float]: ...
def lamb_apply(step: LambStep, ratios: list[float], operands: Operands, threads: int) -> None: ...
def sum_of_squares(factor: float, operands: Operands, threads: int) -> float: ...
def unscale(factor: float, operands: Operands, threads: int) -> float: ...
def cast(operands: Operands, threads: int) -> None: ...
