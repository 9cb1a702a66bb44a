import subprocess

import pytest
import torch

from torch_bwattn import environment


def test_versions_come_without_importing_what_they_are_of():
    found = environment.versions()
    assert found["torch"] == torch.__version__
    assert set(environment.DISTRIBUTIONS) <= set(found)
    assert environment.distribution_version("no-such-distribution-here") is None


@pytest.mark.parametrize(("number", "text"), [(91900, "9.19.0"), (91002, "9.10.2"), (8907, "8.9.7"), (None, None)])
def test_cudnn_numbers_are_read(monkeypatch, number, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert environment.cudnn_version() == text


def test_the_driver_is_asked_of_nvidia_smi(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    assert environment.driver_version() is None
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/bin/{name}")
    answer = subprocess.CompletedProcess([], 0, stdout="580.159.04\n580.159.04\n", stderr="")
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: answer)
    assert environment.driver_version() == "580.159.04"

    def hang(*_, **__):
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(environment.subprocess, "run", hang)
    assert environment.driver_version() is None


def test_only_our_variables_are_shown(monkeypatch):
    monkeypatch.setenv("BWATTN_BACKEND", "aten")
    monkeypatch.setenv("OTHER", "x")
    found = environment.variables()
    assert found["BWATTN_BACKEND"] == "aten"
    assert all(name.startswith("BWATTN_") for name in found)


def test_a_document_can_be_told_its_commit():
    found = environment.describe(None, "abc")
    assert found["commit"] == "abc"
    assert found["device"]["capability"] is None
    assert len(found["date"]) == 20


def test_outside_a_checkout_there_is_no_commit(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    assert environment.commit_hash() is None
