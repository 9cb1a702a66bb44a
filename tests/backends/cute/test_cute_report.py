"""Reports on kernels with known contents and known faults, and on tools that are not there."""

from __future__ import annotations

import re

import pytest

from torch_bwattn.backends.cute import cubin, report
from torch_bwattn.backends.cute.compile import KernelKey, ready
from torch_bwattn.backends.cute.report import compile_report, find_ptxas, table

# The kernel that spills is one long unrolled loop, as it is meant to be.
pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")
needs_ptxas = pytest.mark.skipif(
    find_ptxas() is None, reason="no ptxas that takes PTX 9.3 (pip install 'nvidia-cuda-nvcc>=13.3')"
)


def builder(name, *arguments, **options):
    def build():
        import toy_kernels

        return getattr(toy_kernels, f"build_{name}")(*arguments, **options)

    return build


def cases():
    """What ``python -m torch_bwattn.backends.cute.report`` is pointed at below."""
    return [
        (KernelKey("scale", "sm_90a"), builder("scale", 2)),
        (KernelKey("crowded", "sm_90a"), builder("crowded")),
    ]


@pytest.fixture(scope="module")
def reports():
    found = {}
    for name, build in {
        "product": builder("product"),
        "early": builder("product", read_early=True),
        "serial": builder("product", 176, crowded=True),
        "crowded": builder("crowded"),
        "scale": builder("scale", 2),
    }.items():
        (found[name],) = compile_report(KernelKey(name, "sm_90a"), build)
    return found


def test_a_product_of_four_blocks(reports):
    found = reports["product"]
    assert found.threads == 128
    assert found.registers < 128
    assert found.frame_bytes == 0
    assert found.dynamic_shared_bytes == 2 * 64 * 64 * 2
    counts = found.counts
    assert (counts["HGMMA"], counts["ARRIVE"], counts["gsb0"], counts["DEPBAR"]) == (4, 1, 1, 1)
    assert (counts["STL"], counts["LDL"], counts["MUFU.EX2"]) == (0, 0, 0)
    assert counts["BAR"] == 1


def test_elementwise_work(reports):
    found = reports["scale"]
    assert (found.counts["FFMA"], found.counts["HGMMA"]) == (2, 0)
    assert (found.static_shared_bytes, found.dynamic_shared_bytes) == (0, 0)


@needs_ptxas
def test_clean_kernels_have_no_faults(reports):
    assert reports["product"].faults == ()
    assert reports["scale"].faults == ()


@needs_ptxas
def test_an_accumulator_read_too_early_is_a_fault(reports):
    (fault,) = reports["early"].faults
    assert re.match(r"\(C75\d\d\) .*wgmma", fault)
    assert reports["early"].symbol not in fault


@needs_ptxas
def test_serialized_wgmmas_are_a_fault(reports):
    found = reports["serial"]
    assert found.counts["ARRIVE"] == found.counts["HGMMA"]
    assert any(re.match(r"\(C75\d\d\) .*wgmma.* serialized", fault) for fault in found.faults)


def test_a_message_counts_for_the_kernel_it_names():
    """The forms in which ptxas names one, and one that names none."""
    said = [
        "(C7511) wgmmas are serialized in the function 'first' in line 3",
        "(C7512) wgmmas are serialized for the function 'second'",
        "(C7517) a wait is injected in function 'first'",
        "(C7599) something about wgmmas",
    ]
    assert report._about("first", said) == (
        "(C7511) wgmmas are serialized in the function in line 3",
        "(C7517) a wait is injected in function",
        "(C7599) something about wgmmas",
    )
    assert len(report._about("second", said)) == 2


def test_spills_are_a_fault(reports):
    found = reports["crowded"]
    assert found.threads == 1024
    assert found.registers == 64
    assert found.frame_bytes > 0
    assert found.counts["STL"] > 0
    assert found.counts["LDL"] > 0
    assert any(fault.startswith(f"it spills: {found.frame_bytes} bytes") for fault in found.faults)
    assert not any("spills" in fault for fault in found.faults_beside(found.frame_bytes))
    assert any("spills" in fault for fault in found.faults_beside(found.frame_bytes - 1))


def test_without_ptxas_a_report_says_so_and_is_not_clean(monkeypatch):
    monkeypatch.setattr(report, "find_ptxas", lambda *_: None)
    (found,) = compile_report(KernelKey("product", "sm_90a"), builder("product"))
    assert found.serialized is None
    (fault,) = found.faults
    assert fault.startswith("whether wgmmas are serialized is unknown: ptxas not available for PTX 9.3")
    assert table([found]).splitlines()[1].split()[-2:] == ["?", "1"]


def test_without_nvdisasm_there_is_no_report(monkeypatch):
    monkeypatch.setattr(report, "find_nvdisasm", lambda: None)
    with pytest.raises(RuntimeError, match=r"nvdisasm is not available \(pip install nvidia-cuda-nvdisasm\)"):
        compile_report(KernelKey("scale", "sm_90a"), builder("scale", 2))


def test_a_ptxas_too_old_is_passed_over(tmp_path, monkeypatch):
    """One that refuses every input comes first on the path, and is not the one that is found."""
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\nexit 255\n")
    tool.chmod(0o755)
    monkeypatch.setattr(report, "_locations", lambda _: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    report.find_ptxas.cache_clear()
    assert report.find_ptxas() is None
    tool.write_text("#!/bin/sh\nexit 0\n")
    report.find_ptxas.cache_clear()
    assert report.find_ptxas() == str(tool)
    report.find_ptxas.cache_clear()


def test_too_much_shared_memory_is_a_fault(reports):
    limit = report.SHARED_LIMIT_BYTES["sm_90a"]
    fits = report.dataclasses.replace(reports["scale"], serialized=(), dynamic_shared_bytes=limit)
    assert fits.faults == ()
    (fault,) = report.dataclasses.replace(fits, dynamic_shared_bytes=limit + 16).faults
    assert fault == f"it asks for {limit + 16} bytes of shared memory, of which a block has {limit}"


def test_an_object_that_launches_nothing(reports):
    with pytest.raises(ValueError, match="host_only, which launches none"):
        compile_report(KernelKey("host_only", "sm_90a"), builder("host_only"))


def test_an_object_that_launches_two_kernels():
    found = compile_report(KernelKey("twice", "sm_90a"), builder("twice"))
    assert [item.name for item in found] == ["twice[0]", "twice[1]"]
    assert len({item.symbol for item in found}) == 2
    assert sorted(item.counts["FFMA"] for item in found) == [1, 2]


def test_a_report_caches_nothing(cache, reports):
    assert not cache.exists()
    assert not ready(KernelKey("scale", "sm_90a"))


def test_text(reports):
    text = str(reports["crowded"])
    assert text.startswith("crowded sm_90a: 64 regs, ")
    assert "\n  ! it spills: " in text
    lines = table(reports.values()).splitlines()
    assert lines[0].split()[:3] == ["kernel", "arch", "regs"]
    assert len({len(line) for line in lines[:6]}) == 1
    assert any(line.startswith("crowded: it spills") for line in lines[6:])


def test_the_command(tmp_path, capsys):
    assert report.main([f"{__name__}:cases", "--sass", str(tmp_path)]) == 1
    assert "crowded: it spills" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == ["0-scale.sass", "1-crowded.sass"]


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x01", b"\x7fELF\x02" + bytes(100), b"\x7fELF\x02" + b"\xff" * 100])
def test_what_is_no_cubin_is_refused(data):
    with pytest.raises(ValueError, match="cubin: expected a 64-bit"):
        cubin.resources(data)
