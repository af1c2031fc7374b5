"""The native core against the float64 reference on every usable instruction set, and its promises of equal bits."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.kernels import (
    AdagradRule,
    AdamRule,
    LambRule,
    LionRule,
    SgdRule,
    available,
    choose_instruction_set,
    get_num_threads,
    instruction_sets,
    set_num_threads,
)
from drivetrain.kernels.native_ops import steps as native
from drivetrain.kernels.torch_ops import steps as reference

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native core is not built")

SIZES = [0, 1, 5, 15, 16, 17, 123, 1024, 1025, 4097, 40000]
LOW = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *LOW]


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each usable instruction set in turn."""
    choose_instruction_set(request.param)
    yield request.param
    choose_instruction_set(instruction_sets()[-1])


def _random(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Every step as run(ops, p, g, m, v, copies). `ops`: the module `native` or `reference`; m, v: states, v not negative.
Run = Callable[[Any, list[Tensor], list[Tensor], list[Tensor], list[Tensor], Any], object]

ADAM = AdamRule(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)
ADAM_L2 = AdamRule(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, decoupled=False)
PLAIN = AdamRule(lr=0.1, bias_correction=False)
LION = LionRule(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1)
LAMB = LambRule(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1)
LAMB_INSIDE = LambRule(lr=0.1, eps=1e-3, eps_inside_sqrt=True, bias_correction=False)
ADAGRAD = AdagradRule(lr=0.1, lr_decay=0.1, weight_decay=0.1)
SGD = SgdRule(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1)
NESTEROV = SgdRule(lr=0.1, momentum=0.9, nesterov=True)


def _lamb(rule: LambRule) -> Run:
    def run(ops: Any, p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], copies: Any) -> object:
        norms = ops.lamb_moments(p, g, m, v, rule=rule, step=3, factor=0.5)
        ops.lamb_apply(p, m, v, reference.lamb_ratios(norms, rule), rule=rule, step=3, copies=copies)
        return norms

    return run


STEPS: dict[str, Run] = {
    "adamw": lambda o, p, g, m, v, c: o.adam_step(p, g, m, v, rule=ADAM, step=3, factor=0.5, copies=c),
    "adam_l2": lambda o, p, g, m, v, c: o.adam_step(p, g, m, v, rule=ADAM_L2, step=3, copies=c),
    "adam_uncorrected": lambda o, p, g, m, v, c: o.adam_step(p, g, m, v, rule=PLAIN, step=3, copies=c),
    "adam_rollback": lambda o, p, g, m, v, c: o.adam_rollback(p, g, m, v, rule=ADAM, step=3, factor=0.5, copies=c),
    "lion": lambda o, p, g, m, v, c: o.lion_step(p, g, m, rule=LION, factor=0.5, copies=c),
    "lamb": _lamb(LAMB),
    "lamb_eps_inside": _lamb(LAMB_INSIDE),
    "adagrad": lambda o, p, g, m, v, c: o.adagrad_step(p, g, v, rule=ADAGRAD, step=3, factor=0.5, copies=c),
    "sgd": lambda o, p, g, m, v, c: o.sgd_step(p, g, m, rule=SGD, factor=0.5, copies=c),
    "sgd_first": lambda o, p, g, m, v, c: o.sgd_step(p, g, m, rule=SGD, first=True, copies=c),
    "sgd_nesterov": lambda o, p, g, m, v, c: o.sgd_step(p, g, m, rule=NESTEROV, copies=c),
    "sgd_plain": lambda o, p, g, m, v, c: o.sgd_step(p, g, None, rule=SgdRule(lr=0.1), copies=c),
    "amsgrad": lambda o, p, g, m, v, c: o.adam_step(
        p, g, m, v, rule=ADAM, step=3, max_exp_avg_sqs=[x.flip(0).clone() for x in v], copies=c
    ),
}
steps = pytest.mark.parametrize("step", STEPS)


def _inputs(size: int, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> list[Tensor]:
    """Parameter, gradient, first and second moment, as float64 values that fit the dtypes exactly."""
    param, grad, state = dtypes
    values = [_random(size, 1), _random(size, 2), _random(size, 3), _random(size, 4).square() + 0.05]
    return [value.to(dtype).double() for value, dtype in zip(values, (param, grad, state, state), strict=True)]


def _run(ops: Any, step: str, values: list[Tensor], copies: Any = None) -> None:
    STEPS[step](ops, *([value] for value in values), copies)


@steps
@pytest.mark.parametrize("size", SIZES)
def test_steps_equal_the_float64_reference(isa: str, step: str, size: int) -> None:
    exact = _inputs(size, (torch.float32,) * 3)
    fast = [value.float() for value in exact]
    copy = torch.zeros(size, dtype=torch.bfloat16)
    _run(reference, step, exact)
    _run(native, step, fast, [copy])
    for got, want in zip(fast, exact, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-6)
    assert torch.equal(copy, fast[0].bfloat16())


@steps
@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("state", DTYPES)
def test_steps_take_all_dtypes(step: str, param: torch.dtype, grad: torch.dtype, state: torch.dtype) -> None:
    dtypes = (param, grad, state, state)
    exact = _inputs(123, (param, grad, state))
    fast = [value.to(dtype) for value, dtype in zip(exact, dtypes, strict=True)]
    if step.startswith("lamb") and state != torch.float32:
        # The second phase reads the moments back as they were rounded: the reference must round them too.
        exact = [value.clone() for value in fast]
    copy = torch.zeros(123, dtype=torch.float16)
    _run(reference, step, exact)
    _run(native, step, fast, [copy])
    for got, want, dtype in zip(fast, exact, dtypes, strict=True):
        assert got.dtype == dtype
        # One rounding to the dtype, at most one unit in the last place away where the float32 value lies by a boundary;
        # LAMB's parameters depend on moments that were rounded so.
        eps = max(torch.finfo(dtype).eps, torch.finfo(state).eps if step.startswith("lamb") else 0.0)
        torch.testing.assert_close(got.double(), want.double(), atol=max(eps * 1e-2, 2e-6), rtol=max(eps, 2e-6))
    torch.testing.assert_close(copy.double(), exact[0].double(), atol=1e-3, rtol=max(torch.finfo(param).eps, 1e-3))


def _special_inputs(size: int) -> list[Tensor]:
    p, g, m, v = (value.float() for value in _inputs(size, (torch.float32,) * 3))
    for offset, value in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, 3e38)):
        g[offset::40] = value
        m[offset + 8 :: 40] = value
        p[offset + 16 :: 40] = value
    return [p, g, m, v]


@steps
@pytest.mark.parametrize("low", DTYPES)
def test_instruction_sets_agree_bitwise(step: str, low: torch.dtype) -> None:
    results = []
    for name in instruction_sets():
        choose_instruction_set(name)
        values = [_special_inputs(1037)[0], *(value.to(low) for value in _special_inputs(1037)[1:])]
        copy = torch.zeros(1037, dtype=torch.bfloat16)
        _run(native, step, values, [copy])
        results.append([*values, copy])
    choose_instruction_set(instruction_sets()[-1])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=0, rtol=0, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(
    step=st.sampled_from([name for name in STEPS if not name.startswith("lamb")]),
    cuts=st.lists(st.integers(0, 3000), max_size=5),
    threads=st.integers(1, 4),
    isa=st.sampled_from(instruction_sets() or ("none",)),
)
def test_bits_depend_neither_on_cuts_nor_alignment_nor_threads(
    step: str, cuts: list[int], threads: int, isa: str
) -> None:
    choose_instruction_set(isa)
    whole = [value.float() for value in _inputs(3000, (torch.float32,) * 3)]
    top = whole[3].flip(0).clone()
    cut = [value.clone() for value in whole]
    bounds = [0, *sorted(cuts), 3000]

    def run(values: list[list[Tensor]], tops: list[Tensor]) -> None:
        if step == "amsgrad":
            native.adam_step(*values, rule=ADAM, step=3, max_exp_avg_sqs=tops)
        else:
            STEPS[step](native, *values, None)

    run([[value] for value in whole], [top.clone()])
    set_num_threads(threads)
    slices = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    run([[value[s] for s in slices] for value in cut], [top.clone()[s] for s in slices])
    set_num_threads(None)
    choose_instruction_set(instruction_sets()[-1])
    for one, many in zip(whole, cut, strict=True):
        assert torch.equal(one, many)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares_and_unscale(isa: str, size: int, dtype: torch.dtype) -> None:
    tensors = [_random(size, 1).to(dtype), _random(7, 2).float()]
    want = sum(float((tensor.double() * 0.25).square().sum()) for tensor in tensors)
    assert float(native.sum_of_squares(tensors, factor=0.25)) == pytest.approx(want, rel=1e-12)
    scaled = [(tensor.double() * 0.25).to(tensor.dtype) for tensor in tensors]
    assert float(native.unscale(tensors, 0.25)) == pytest.approx(want, rel=1e-12)
    for got, expected in zip(tensors, scaled, strict=True):
        assert torch.equal(got, expected)


def test_sums_are_the_same_bits_on_every_instruction_set_and_number_of_threads() -> None:
    tensor = _random(100_003, 1).float()
    totals = set()
    for name in instruction_sets():
        choose_instruction_set(name)
        for threads in (1, 2, 3):
            set_num_threads(threads)
            totals.add(float(native.sum_of_squares([tensor])))
            totals.add(float(native.sum_of_squares([torch.cat([torch.zeros(3), tensor])[3:]])))
    set_num_threads(None)
    assert len(totals) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_shows_in_the_sum(isa: str, bad: float, place: int, dtype: torch.dtype) -> None:
    tensor = torch.ones(4097, dtype=dtype)
    assert float(native.sum_of_squares([tensor])) == 4097.0
    tensor[place] = bad
    assert not math.isfinite(float(native.sum_of_squares([tensor])))
    assert not math.isfinite(float(native.unscale([tensor], 0.5)))


@pytest.mark.parametrize("low", LOW)
def test_casts_round_as_torch_over_all_values(isa: str, low: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(low)
    wide = torch.empty(2**16)
    native.cast([every], [wide])
    torch.testing.assert_close(wide, every.float(), atol=0, rtol=0, equal_nan=True)
    # All low values, their midpoints and the neighbours of those, at every offset that a tail can have.
    bits = wide.view(torch.int32)
    dropped = 16 if low == torch.bfloat16 else 13
    half = 1 << (dropped - 1)
    for delta in (0, 1, half - 1, half, half + 1, (1 << dropped) - 1):
        source = (bits + delta).view(torch.float32)[delta % 17 :]
        target = torch.empty(source.numel(), dtype=low)
        native.cast([source], [target])
        torch.testing.assert_close(target, source.to(low), atol=0, rtol=0, equal_nan=True)


def test_casts_between_the_low_dtypes() -> None:
    source = _random(37, 1).bfloat16()
    target = torch.empty(37, dtype=torch.float16)
    native.cast([source], [target])
    assert torch.equal(target, source.half())


def test_what_the_core_has_no_loops_for_takes_plain_torch() -> None:
    p = [torch.ones(4, dtype=torch.float64), torch.ones(4, 6).t(), torch.ones(3)]
    g = [torch.ones(4, dtype=torch.float64), torch.ones(6, 4), torch.ones(3)]
    m = [torch.zeros_like(x) for x in p]
    v = [torch.zeros_like(x) for x in p]
    copies = [None, torch.zeros(6, 4), None]
    native.adam_step(p, g, m, v, rule=AdamRule(lr=0.1), step=1, copies=copies)
    for param in p:
        torch.testing.assert_close(param, torch.full_like(param, 0.9))
    assert copies[1] is not None
    torch.testing.assert_close(copies[1], torch.full((6, 4), 0.9))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: native.lion_step([torch.ones(3)], [torch.ones(2)], [torch.ones(3)], rule=LION),
            "lion_step: grads 0 has 2 elements, but its first operand has 3",
        ),
        (
            lambda: native.lion_step([torch.ones(3)], [], [torch.ones(3)], rule=LION),
            "lion_step: 0 grads for 1 params; the lists must be parallel",
        ),
        (
            lambda: native.sum_of_squares([torch.ones(3, device="meta")]),
            "sum_of_squares: tensors 0 lies on meta; this op works in host memory",
        ),
        (
            lambda: native.lion_step([torch.ones(1)], [torch.ones(1)], [torch.ones(1)], rule=LION, copies=[]),
            "lion_step: 0 copies for 1 params",
        ),
        (
            lambda: native.lamb_apply(
                [torch.ones(1)], [torch.ones(1)], [torch.ones(1)], torch.ones(2), rule=LAMB, step=1
            ),
            r"expected one ratio for each of 1 tensors, found \(2,\)",
        ),
        (lambda: set_num_threads(0), "expected a number of at least 1, or None to follow torch; found 0"),
        (lambda: choose_instruction_set("mmx"), "instruction set 'mmx' is not usable on this machine; usable: "),
    ],
)
def test_bad_calls_are_refused_before_memory_is_touched(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_threads_follow_torch_unless_set() -> None:
    assert get_num_threads() == torch.get_num_threads()
    set_num_threads(3)
    assert get_num_threads() == 3
    set_num_threads(None)
    assert get_num_threads() == torch.get_num_threads()


def _sum_in_child(queue: Any, tensor: Tensor) -> None:
    # The tensor comes from the parent: torch's own thread pool does not survive a fork.
    queue.put(float(native.sum_of_squares([tensor])))


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_gets_its_own_threads() -> None:
    set_num_threads(2)
    tensor = torch.ones(200_000)
    assert float(native.sum_of_squares([tensor])) == 200_000
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_sum_in_child, args=(queue, tensor))
    child.start()
    child.join(20)
    alive = child.is_alive()
    if alive:
        child.kill()
    set_num_threads(None)
    assert not alive
    assert queue.get() == 200_000


def test_calls_from_several_python_threads_take_turns() -> None:
    set_num_threads(2)
    results: list[float] = []

    def work() -> None:
        for _ in range(20):
            results.append(float(native.sum_of_squares([torch.ones(100_000)])))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    set_num_threads(None)
    assert results == [100_000.0] * 80


def test_a_step_is_seen_by_autograd() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    loss = param.square().sum()
    native.lion_step([param], [torch.ones(3)], [torch.zeros(3)], rule=LION)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_environment_can_choose_the_instruction_set() -> None:
    code = "from drivetrain.kernels import available; print(available()[0].implementation)"
    first = instruction_sets()[0]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DRIVETRAIN_INSTRUCTION_SET": first},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"native ({first})"
    served = {status.op: status.implementation for status in available() if status.device == "cpu"}
    assert all(served[op].startswith("native") for op in native.__all__)
