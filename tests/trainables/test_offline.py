"""Nothing is fetched because a package is imported."""

from __future__ import annotations

import logging
import sys
import types

import pytest

from trainables.offline import without_hub_kernels


@pytest.mark.parametrize("installed", [True, False])
def test_no_kernel_of_a_hub_can_be_asked_for_inside(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    own = types.ModuleType("kernels")
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    if installed:
        monkeypatch.setitem(sys.modules, "kernels", own)
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with without_hub_kernels():
        with pytest.raises(ImportError):
            import kernels  # noqa: F401
        assert not logger.isEnabledFor(logging.WARNING)
    assert sys.modules.get("kernels") is (own if installed else None)
    assert ("kernels" in sys.modules) == installed
    assert logger.isEnabledFor(logging.WARNING)
