"""What a launch does on a GPU: values, streams, devices, graphs, threads."""

from __future__ import annotations

import threading

import pytest
import torch

from torch_bwattn.backends.cute.compile import KernelKey, compiled
from torch_bwattn.target import target_of

pytestmark = pytest.mark.gpu
several = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")


def build():
    import toy_kernels

    return toy_kernels.build_scale(2)


def launcher(device="cuda"):
    return compiled(KernelKey("scale", target_of(torch.device(device)), (2, torch.float32)), build)


def operands(device="cuda", rows=33):
    x = torch.randn(rows, 256, device=device)
    return x, torch.zeros_like(x)


def check(x, y, scale=2.0, shift=3):
    torch.testing.assert_close(y, x * scale + shift)


def test_values():
    x, y = operands()
    launcher()(x, y, 2.0, 3)
    check(x, y)


def test_from_disk_in_another_process(child):
    """Loads and launches without cutlass."""
    launcher()
    output = child("""
from torch_bwattn.target import target_of
key = KernelKey("scale", target_of(torch.device("cuda")), (2, torch.float32))
x = torch.randn(33, 256, device="cuda")
y = torch.zeros_like(x)
compiled(key, build_scale(2))(x, y, 2.0, 3)
torch.testing.assert_close(y, x * 2 + 3)
print(built, "cutlass" in sys.modules)
""")
    assert output == "[] False"


def test_the_object_file_launches_too(monkeypatch):
    monkeypatch.setenv("CC", "none-such")
    x, y = operands()
    launcher()(x, y, 2.0, 3)
    check(x, y)


def test_the_current_stream_is_used():
    """On any other stream the kernel would read x before it is written: the writer waits first."""
    launch = launcher()
    x, y = operands()
    launch(x, y, 2.0, 3)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.fill_(7.0)
        launch(x, y, 2.0, 3)
    stream.synchronize()
    check(x, y)
    torch.cuda.synchronize()


def test_a_captured_launch_is_replayed():
    launch = launcher()
    x, y = operands()
    launch(x, y, 2.0, 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, y, 2.0, 3)
    x.normal_()
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    check(x, y)


@several
def test_the_device_of_the_tensors_is_used():
    launch = launcher("cuda:1")
    with torch.cuda.device(0):
        x, y = operands("cuda:1")
        stream = torch.cuda.Stream("cuda:1")
        torch.cuda.synchronize(1)
        with torch.cuda.stream(stream):
            torch.cuda.set_device(0)
            launch(x, y, 2.0, 3)
            assert torch.cuda.current_device() == 0
        stream.synchronize()
        check(x, y)


@several
def test_tensors_of_two_devices_are_refused():
    x, _ = operands("cuda:0")
    _, y = operands("cuda:1")
    with pytest.raises(ValueError, match=r"argument #1 .*device"):
        launcher()(x, y, 2.0, 3)


def test_first_launches_from_threads():
    launch = launcher()
    barrier = threading.Barrier(8)
    results = []

    def work():
        x, y = operands()
        barrier.wait()
        launch(x, y, 2.0, 3)
        results.append((x, y))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 8
    for x, y in results:
        check(x, y)
