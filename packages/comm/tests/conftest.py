"""What the tests of collectives share."""

from __future__ import annotations

import pytest

from drivetrain_testkit import transports


@pytest.fixture(params=transports.TRANSPORTS)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each carrier of host tensors in turn: what ranks that are started now use."""
    chosen: str = request.param
    reason = transports.refusal(chosen)
    if reason:
        pytest.skip(reason)
    for name, value in transports.setting(chosen).items():
        monkeypatch.setenv(name, value)
    return chosen
