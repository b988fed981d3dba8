import threading

import pytest
import torch

from kinfed import gemm
from kinfed.gemm import Probe, fast_gemm, probe

SETTING, MEASURED = gemm._setting(), gemm._probe
pytestmark = pytest.mark.skipif(SETTING is None, reason="this PyTorch cannot send products to oneDNN")


@pytest.fixture(autouse=True)
def fresh():
    MEASURED.cache_clear()
    before = SETTING.fp32_precision
    yield
    assert SETTING.fp32_precision == before
    assert gemm._inside == 0
    MEASURED.cache_clear()


def found(verdict):
    return Probe(2.0, 1e-7, 1e-7, False, verdict, "as the test says")


def test_the_setting_is_switched_on_and_restored():
    before = SETTING.fp32_precision
    with fast_gemm("on"):
        assert SETTING.fp32_precision == "bf16"
        with fast_gemm("on"):
            pass
        assert SETTING.fp32_precision == "bf16"  # the outer one has not left
    assert SETTING.fp32_precision == before


def test_what_was_set_before_comes_back():
    before = SETTING.fp32_precision
    SETTING.fp32_precision = "ieee"
    with fast_gemm("on"):
        assert SETTING.fp32_precision == "bf16"
    assert SETTING.fp32_precision == "ieee"
    SETTING.fp32_precision = before


def test_an_exception_restores_it():
    with pytest.raises(KeyError), fast_gemm("on"):
        raise KeyError


def test_off_and_a_verdict_against_it_change_nothing(monkeypatch):
    before = SETTING.fp32_precision
    monkeypatch.setattr(gemm, "_probe", lambda *product: found(False))
    for mode in ("off", "auto"):
        with fast_gemm(mode):
            assert SETTING.fp32_precision == before
    monkeypatch.setattr(gemm, "_probe", lambda *product: found(True))
    with fast_gemm("off"):
        assert SETTING.fp32_precision == before
    with fast_gemm():
        assert SETTING.fp32_precision == "bf16"


def test_the_last_thread_to_leave_restores_it():
    before, inside, leave = SETTING.fp32_precision, threading.Event(), threading.Event()

    def other():
        with fast_gemm("on"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with fast_gemm("on"):
        thread.start()
        assert inside.wait(10)
    assert SETTING.fp32_precision == "bf16"  # the other thread is still at work
    leave.set()
    thread.join()
    assert SETTING.fp32_precision == before


def test_float64_and_results_to_rounding():
    draw = torch.Generator().manual_seed(1)
    a, b = torch.randn(70, 300, generator=draw), torch.randn(300, 90, generator=draw)
    exact = a.double() @ b.double()
    with fast_gemm("auto" if gemm.has_amx() else "on"):
        assert torch.equal(a.double() @ b.double(), exact)
        torch.testing.assert_close((a @ b).double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


def test_probe_measures_and_remembers():
    first = probe((48, 64, 80))
    assert probe((48, 64, 80)) is first
    if first.amx:
        assert not first.verdict
    else:
        assert 0 < first.faster < 1000
        assert 0 < first.error < 1e-5
        assert "[48, 64] @ [64, 80]" in first.reason


def test_a_large_product_is_cut_to_one_of_its_kind(monkeypatch):
    asked = []
    monkeypatch.setattr(gemm, "_probe", lambda m, k, n, threads: asked.append((m, k, n)) or found(True))
    probe((20, 20, 11_000_000))
    probe((300, 200, 100))
    (m, k, n), small = asked
    assert (m, k) == (20, 20)
    assert 25_000 < n < 55_000  # 2^21 numbers, 40 in a column
    assert small == (300, 200, 100)


def test_processors_with_tiles_are_left_alone_unless_asked(monkeypatch):
    before = SETTING.fp32_precision
    monkeypatch.setattr(gemm, "has_amx", lambda: True)
    found = probe((32, 32, 32))
    assert found.amx
    assert not found.verdict
    assert "AMX" in found.reason
    with fast_gemm("auto", (32, 32, 32)):
        assert SETTING.fp32_precision == before
    with fast_gemm("on", (32, 32, 32)):
        assert SETTING.fp32_precision == "bf16"


def test_a_library_that_rounds_is_found_out(monkeypatch):
    real = torch.mm

    def rounding(a, b, out):
        if SETTING.fp32_precision == "bf16":
            return out.copy_((a.bfloat16() @ b.bfloat16()).float())
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "mm", rounding)
    monkeypatch.setattr(gemm, "_time", lambda run: run() is None or 1.0 + (SETTING.fp32_precision == "ieee"))
    found = probe((64, 64, 64))
    assert found.faster == 2
    assert found.fast_error > 1e-3
    assert not found.verdict
    assert "rounds" in found.reason


@pytest.mark.parametrize(("default", "verdict"), [(1.05, False), (1.2, True)])
def test_only_a_clear_gain_counts(monkeypatch, default, verdict):
    monkeypatch.setattr(gemm, "has_amx", lambda: False)
    monkeypatch.setattr(
        gemm, "_time", lambda run: run() is None or (default if SETTING.fp32_precision == "ieee" else 1.0)
    )
    found = probe((32, 32, 32))
    assert found.verdict == verdict
    assert found.faster == default
