"""The environment that each layout needs: what Megatron-core's overlap relies on, and threads shared out fairly."""

import pytest

from conf.schema import Config, Device
from parallel import devices, host
from parallel.environment import apply, rank_environment


def layout(tp=1, cp=1, zero=0, device=Device.cuda, env=None) -> Config:
    cfg = Config()
    cfg.parallel.tp, cfg.parallel.cp, cfg.parallel.zero = tp, cp, zero
    cfg.parallel.env, cfg.launch.device = env or {}, device
    return cfg


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """`gpu("9.0")`: nvidia-smi reports this compute capability."""

    def capability(text: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {text}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        devices.capability.cache_clear()

    yield capability
    devices.capability.cache_clear()


@pytest.mark.parametrize(
    ("capability", "shape", "expected"),
    [
        ("9.0", {"tp": 2}, "1"),
        ("9.0", {"cp": 2}, "1"),
        ("10.0", {"tp": 2}, None),
        ("9.0", {}, None),
        ("9.0", {"zero": 1}, None),
        ("9.0", {"zero": 2}, None),
        ("9.0", {"zero": 3, "tp": 2}, None),
        ("9.0", {"zero": 1, "tp": 2}, "1"),
        ("unreadable", {"tp": 2}, "1"),
    ],
)
def test_hardware_queues_follow_the_layout(gpu, capability, shape, expected):
    gpu(capability)
    env = rank_environment(layout(**shape), 4)
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == expected
    # A value that the shell exports does not leak into a layout that forbids it.
    assert apply(env, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}).get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


def test_the_users_own_variables_win(gpu):
    gpu("9.0")
    env = rank_environment(layout(tp=2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_DEBUG": "INFO"}), 2)
    assert (env["CUDA_DEVICE_MAX_CONNECTIONS"], env["NCCL_DEBUG"]) == ("8", "INFO")


def test_gpus_are_hidden_from_ranks_on_the_cpu_only():
    assert rank_environment(layout(device=Device.cpu), 2)["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(layout(), 2)


def test_cores_are_shared_out_and_the_shell_may_say_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = host.cores()
    for local in (1, 2, 1000):
        assert rank_environment(layout(), 1000, local)["OMP_NUM_THREADS"] == str(max(1, cores // local))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert rank_environment(layout(), 2)["OMP_NUM_THREADS"] == "7"


def test_threads_of_a_cpu_rank_do_not_spin_for_long_unless_the_shell_says_so(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert rank_environment(layout(device=Device.cpu), 1)["GOMP_SPINCOUNT"] == "10000"
    assert "GOMP_SPINCOUNT" not in rank_environment(layout(), 1)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert rank_environment(layout(device=Device.cpu), 1)["GOMP_SPINCOUNT"] == "7"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in rank_environment(layout(device=Device.cpu), 1)


def test_a_containers_limits_count(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    cores, (total, _) = host.cores(), host.memory()
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert (host.cores(), host.memory()) == (1, (1000000, 600000))
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (host.cores(), host.memory()[0]) == (cores, total)


def test_the_loopback_interface_is_named_on_one_machine_only():
    assert rank_environment(layout(), 4)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(layout(), 4, 2)
