import re
import threading
from pathlib import Path

import pytest
import torch

from kinfed.ops import gemm
from kinfed.ops.gemm import fast_gemm, objection, suits

SETTING = gemm._setting()
pytestmark = pytest.mark.skipif(SETTING is None, reason="this PyTorch cannot send products to oneDNN")


@pytest.fixture(autouse=True)
def fresh():
    objection.cache_clear()
    before = SETTING.fp32_precision
    yield
    assert SETTING.fp32_precision == before
    assert gemm._inside == 0
    objection.cache_clear()


@pytest.fixture
def zen5(monkeypatch):
    """A processor that the rule is for."""
    monkeypatch.setattr(gemm, "has_amx", lambda: False)
    monkeypatch.setattr(gemm, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(gemm, "_compare", lambda: (40.0, 1e-5, 2e-5))


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


def test_off_and_small_products_change_nothing(zen5):
    before = SETTING.fp32_precision
    for mode, product in (("off", (512, 512, 512)), ("auto", (8, 64, 64))):
        with fast_gemm(mode, product):
            assert SETTING.fp32_precision == before
    with fast_gemm("auto", (512, 512, 512)):
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


def test_large_products_on_amds_avx512_suit(zen5):
    assert objection() == ""
    assert suits((16, 256, 256))  # 2^20 multiplications
    assert not suits((15, 256, 256))
    assert suits((20, 20, 11_000_000))


@pytest.mark.parametrize(
    ("where", "name", "says", "reason"),
    [
        (gemm, "has_amx", True, "oneDNN would round to bfloat16 \\(AMX\\)"),
        (gemm, "_vendor", "GenuineIntel", "this one is GenuineIntel with AVX512"),
        (gemm, "_vendor", "", "this one is unknown with AVX512"),
        (torch.backends.cpu, "get_cpu_capability", "AVX2", "this one is AuthenticAMD with AVX2"),
        (torch.backends.mkl, "is_available", False, "default library is not MKL"),
        (gemm, "_compare", (40.0, 1e-5, 0.1), "oneDNN rounds: its error is 0.1, the default's 1e-05"),
    ],
)
def test_other_processors_are_left_alone_unless_asked(zen5, monkeypatch, where, name, says, reason):
    monkeypatch.setattr(where, name, lambda: says)
    assert re.search(reason, objection())
    assert not suits((512, 512, 512))
    before = SETTING.fp32_precision
    with fast_gemm("auto", (512, 512, 512)):
        assert SETTING.fp32_precision == before
    with fast_gemm("on"):
        assert SETTING.fp32_precision == "bf16"


def test_a_library_that_rounds_is_found_out(monkeypatch):
    real = torch.mm

    def rounding(a, b):
        return (a.bfloat16() @ b.bfloat16()).float() if SETTING.fp32_precision == "bf16" else real(a, b)

    largest, default, other = gemm._compare()
    assert 30 < largest < 60
    assert default < 1e-4
    if not gemm.has_amx():
        assert other < gemm.WORSE * default
    monkeypatch.setattr(torch, "mm", rounding)
    assert gemm._compare()[2] > 1e-2


def test_the_maker_is_read_where_linux_and_windows_say_it(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: "processor\t: 0\nvendor_id\t: AuthenticAMD\nvendor_id\t: X\n")
    assert gemm._vendor() == "AuthenticAMD"

    def absent(path):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr("platform.processor", lambda: "AMD64 Family 25 Model 33 Stepping 2, AuthenticAMD")
    assert gemm._vendor() == "AuthenticAMD"
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert gemm._vendor() != "AuthenticAMD"
