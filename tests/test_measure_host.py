from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import types

import pytest

from kdtree.measure import distrust, host, nvml, results


class NVMLError(Exception):
    pass


class FakeNvml(types.ModuleType):
    """pynvml of a machine with one H200, two other processes and a driver that counts events."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_SUCCESS = 1, 2, 0, 0
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVMLError_FunctionNotFound = type("NVMLError_FunctionNotFound", (NVMLError,), {})

    def __init__(self):
        super().__init__("pynvml")
        self.open, self.bits, self.broken = 0, 0x1, {}
        self.pids = [os.getpid(), 1_000_001, 1_000_002]

    def __getattribute__(self, name):
        broken = super().__getattribute__("__dict__").get("broken", {})
        if name in broken:
            error = broken[name]
            if error is AttributeError:
                raise AttributeError(name)

            def fail(*_):
                raise error

            return fail
        return super().__getattribute__(name)

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.159.04"

    def nvmlDeviceGetHandleByPciBusId(self, bus):
        assert bus == "0000:65:00.0"
        return "handle"

    def nvmlDeviceGetName(self, h):
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, h):
        return types.SimpleNamespace(total=150_000, used=50_000, free=100_000)

    def nvmlDeviceGetClockInfo(self, h, kind):
        return {1: 345, 2: 3201}[kind]

    def nvmlDeviceGetMaxClockInfo(self, h, kind):
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetPowerUsage(self, h):
        return 75_500

    def nvmlDeviceGetPowerManagementLimit(self, h):
        return 700_000

    nvmlDeviceGetPowerManagementDefaultLimit = nvmlDeviceGetPowerManagementLimit

    def nvmlDeviceGetTemperature(self, h, sensor):
        return 31

    def nvmlDeviceGetEccMode(self, h):
        return [1, 1]

    def nvmlDeviceGetMigMode(self, h):
        return [0, 0]

    def nvmlDeviceGetCurrentClocksEventReasons(self, h):
        return self.bits

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, h):
        return 0x40

    def nvmlDeviceGetFieldValues(self, h, ids):
        def one(i):
            value = types.SimpleNamespace(ullVal=i * 10**9)
            return types.SimpleNamespace(nvmlReturn=0 if i == 74 else 3, valueType=3, value=value)

        return [one(i) for i in ids]

    def nvmlDeviceGetUtilizationRates(self, h):
        return types.SimpleNamespace(gpu=3, memory=1)

    def nvmlDeviceGetComputeRunningProcesses(self, h):
        return [types.SimpleNamespace(pid=p, usedGpuMemory=2**20) for p in self.pids]


@pytest.fixture
def gpu(monkeypatch):
    """A machine with an H200, without one."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr("kdtree.device.gpu_available", lambda: True)
    monkeypatch.setattr("kdtree.device.gpu_count", lambda: 1)
    driver = pytest.importorskip("cuda.bindings.driver")
    ok = driver.CUresult.CUDA_SUCCESS
    attributes = driver.CUdevice_attribute
    known = {
        attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
        attributes.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: 60 * 2**20,
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
        attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232_448,
    }
    monkeypatch.setattr(driver, "cuInit", lambda flags: (ok,))
    monkeypatch.setattr(driver, "cuDeviceGet", lambda i: (ok, i))
    monkeypatch.setattr(driver, "cuDeviceGetPCIBusId", lambda n, d: (ok, b"0000:65:00.0\0"))
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda a, d: (ok, known[a]))
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (ok, 13000))
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxGetState", lambda d: (ok, 0, 0))
    fake.driver, fake.known = driver, known
    return fake


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("kdtree.device.gpu_available", lambda: False)
    monkeypatch.setattr("kdtree.device.gpu_count", lambda: 0)


def test_a_machine_without_a_gpu_is_simulated_and_that_is_no_gap(no_gpu):
    info = host.collect()
    assert info["gpu"] is None and info["simulated"] is True and info["gpu_count"] == 0
    assert not any(name.startswith(("gpu", "driver", "cuda")) for name in info["missing"])
    assert host.slug(info) == f"simulated-{platform.machine()}"
    assert info["cpu"]["threads"] >= 1 and info["ram_bytes"] > 2**20
    assert info["libraries"]["numpy"] and "torch" in info["libraries"]
    json.loads(results.dumps(info))


def test_collecting_imports_neither_numba_nor_torch_nor_nvml():
    code = (
        "import sys; from kdtree.measure import host; host.collect();"
        "print(sorted({'numba', 'torch', 'pynvml', 'cuda.bindings'} & set(sys.modules)))"
    )
    env = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "[]"


def test_a_gpu_is_described_from_nvml_and_the_driver(gpu):
    info = host.collect()
    assert info["simulated"] is False and info["driver"] == "580.159.04" and info["cuda"] == "13.0"
    assert info["gpu"] == {
        "compute_capability": "9.0",
        "sm_count": 132,
        "l2_bytes": 60 * 2**20,
        "shared_per_block_bytes": 232_448,
        "name": "NVIDIA H200",
        "memory_bytes": 150_000,
        "memory_used_bytes": 50_000,
        "clocks": {"sm_mhz": 345, "memory_mhz": 3201, "sm_max_mhz": 1980, "memory_max_mhz": 3201},
        "power_w": 75.5,
        "power_limit_w": 700.0,
        "power_limit_default_w": 700.0,
        "temperature_c": 31,
        "ecc": True,
        "mig": False,
        "throttle": ["gpu_idle"],
        "throttle_ns": {"sw_power_cap": 74 * 10**9},
        "utilization_percent": 3,
        "other_processes": 2,
        "other_processes_bytes": 2 * 2**20,
    }
    assert host.slug(info) == "nvidia-h200"
    assert gpu.open == 0
    assert not any(name.startswith(("gpu", "driver", "cuda")) for name in info["missing"])


def test_nothing_about_person_machine_or_place_is_in_it(gpu):
    text = results.dumps(host.collect())
    for word in (platform.node(), str(host.ROOT), os.path.expanduser("~")):
        assert len(word) < 3 or word not in text
    assert not re.search(r'"[^"]*(?<!\w)/(?:home|root|work|tmp|usr)/', text)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("nvmlDeviceGetCurrentClocksEventReasons", "throttle"),
        ("nvmlDeviceGetComputeRunningProcesses", "other_processes"),
        ("nvmlDeviceGetPowerManagementLimit", "power_limit_w"),
        ("nvmlDeviceGetEccMode", "ecc"),
        ("nvmlDeviceGetName", "name"),
    ],
)
def test_what_cannot_be_read_is_null_and_listed_with_the_reason(gpu, call, field):
    gpu.broken[call] = NVMLError("/dev/nvidia0: Insufficient Permissions")
    info = host.collect()
    assert info["gpu"][field] is None and info["complete"] is False
    assert info["missing"][f"gpu.{field}"] == "NVMLError: nvidia0: Insufficient Permissions"


def test_what_a_gpu_does_not_have_is_no_gap_but_what_trust_needs_is(gpu):
    for call in ("nvmlDeviceGetEccMode", "nvmlDeviceGetMigMode", "nvmlDeviceGetCurrentClocksEventReasons"):
        gpu.broken[call] = gpu.NVMLError_NotSupported("Not Supported")
    info = host.collect()
    assert info["gpu"]["ecc"] is info["gpu"]["mig"] is info["gpu"]["throttle"] is None
    assert {name for name in info["missing"] if name.startswith("gpu.")} == {"gpu.throttle"}


@pytest.mark.parametrize("error", [AttributeError, FakeNvml.NVMLError_FunctionNotFound()])
def test_old_drivers_are_asked_by_the_old_name(gpu, error):
    gpu.broken["nvmlDeviceGetCurrentClocksEventReasons"] = error
    assert host.collect()["gpu"]["throttle"] == ["hw_thermal_slowdown"]


def test_without_nvml_the_driver_still_tells_what_it_knows(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    info = host.collect()
    assert info["gpu"]["sm_count"] == 132 and info["gpu"]["name"] is None
    assert info["driver"] is None and set(info["gpu"]) == {*nvml.ATTRIBUTES, *nvml.FIELDS}
    assert {"gpu.nvml", "driver"} <= set(info["missing"])
    assert host.slug(info) == "unknown-gpu"


def test_a_driver_that_answers_with_an_error_is_quoted(gpu, monkeypatch):
    refused = gpu.driver.CUresult.CUDA_ERROR_NO_DEVICE
    monkeypatch.setattr(gpu.driver, "cuInit", lambda flags: (refused,))
    info = host.collect()
    assert info["missing"]["gpu.attributes"] == "RuntimeError: the CUDA driver answered CUDA_ERROR_NO_DEVICE"


def test_in_a_container_one_stranger_is_ourselves(gpu, monkeypatch):
    gpu.pids = [1_000_001]
    assert host.collect()["gpu"]["other_processes"] == 1
    holds = lambda device: (gpu.driver.CUresult.CUDA_SUCCESS, 0, 1)  # noqa: E731
    monkeypatch.setattr(gpu.driver, "cuDevicePrimaryCtxGetState", holds)
    assert host.collect()["gpu"]["other_processes"] == 0
    gpu.pids = [1_000_001, 1_000_002]
    assert host.collect()["gpu"]["other_processes"] == 1
    gpu.pids = []
    assert host.collect()["gpu"]["other_processes"] == 0


def test_memory_is_that_of_the_current_gpu(gpu):
    assert nvml.gpu_memory() == (100_000, 50_000) and gpu.open == 0


def test_throttle_bits_become_words_and_unknown_ones_stay_visible():
    assert nvml.throttle_words(0) == []
    assert nvml.throttle_words(0x1 | 0x4 | 0x40) == ["gpu_idle", "sw_power_cap", "hw_thermal_slowdown"]
    assert nvml.throttle_words(0x400) == ["0x400"]


@pytest.mark.parametrize(
    ("name", "mig", "expected"),
    [
        ("NVIDIA H200", False, "nvidia-h200"),
        ("NVIDIA GeForce RTX 5070 Ti", None, "nvidia-geforce-rtx-5070-ti"),
        ("NVIDIA A100-SXM4-80GB", True, "nvidia-a100-sxm4-80gb-mig-42sm"),
        ("../x / y", False, "x-y"),
    ],
)
def test_a_slug_is_a_safe_folder_name(name, mig, expected):
    assert host.slug({"gpu": {"name": name, "mig": mig, "sm_count": 42}}) == expected


# source fingerprint -----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    package = tmp_path / "kdtree"
    for name in ("kernels/topk.py", "ref/topk.py", "ops.py", "report/plots.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    monkeypatch.setattr(host, "PACKAGE", package)
    monkeypatch.setattr(host, "ROOT", tmp_path)
    return package


def test_the_fingerprint_follows_paths_and_contents_of_the_sources_alone(tree):
    first = host.source_fingerprint()
    assert re.fullmatch("[0-9a-f]{12}", first)
    (tree / "report/plots.py").write_text("other")
    (tree / "kernels/__pycache__").mkdir()
    (tree / "kernels/__pycache__/topk.pyc").write_bytes(b"x")
    assert host.source_fingerprint() == first
    (tree / "kernels/topk.py").write_text("other")
    second = host.source_fingerprint()
    (tree / "kernels/topk.py").rename(tree / "kernels/top.py")
    third = host.source_fingerprint()
    (tree / "tree.py").write_text("")
    assert len({first, second, third, host.source_fingerprint()}) == 4


# commit and dirty -------------------------------------------------------------------------------------------


def git(cwd, *words):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *words], cwd=cwd, check=True, capture_output=True)


def test_the_tree_is_dirty_with_a_new_file_but_not_with_a_new_report(tree, tmp_path, no_gpu):
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    info = host.collect()
    assert re.fullmatch("[0-9a-f]{40}", info["commit"]) and info["dirty"] is False
    (tmp_path / "reports/h/r").mkdir(parents=True)
    (tmp_path / "reports/h/r/results.jsonl").write_text("{}")
    assert host.collect()["dirty"] is False
    (tree / "kernels/new.py").write_text("")
    assert host.collect()["dirty"] is True


def test_a_package_inside_some_other_repository_has_no_commit(tree, tmp_path, monkeypatch, no_gpu):
    git(tmp_path, "init", "-q")
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(host, "ROOT", tmp_path / "site-packages")
    info = host.collect()
    assert info["commit"] is info["dirty"] is None and info["complete"] is False
    assert "checkout of its own" in info["missing"]["commit"]


def test_without_git_there_is_a_reason(monkeypatch, no_gpu):
    monkeypatch.setenv("PATH", "")
    info = host.collect()
    assert info["commit"] is None and info["missing"]["commit"].startswith("FileNotFoundError")


# trust ------------------------------------------------------------------------------------------------------


def snapshot(at="2026-12-01T10:00:00Z", **changes):
    clocks = {"sm_mhz": 1980, "memory_mhz": 3201, "sm_max_mhz": 1980, "memory_max_mhz": 3201}
    gpu = {"name": "NVIDIA H200", "clocks": clocks, "power_limit_w": 700.0, "throttle": [], "throttle_ns": {}}
    gpu |= {"utilization_percent": 0, "other_processes": 0, "other_processes_bytes": 0}
    info = {"at": at, "simulated": False, "commit": "a" * 40, "dirty": False, "source": "s", "driver": "580"}
    own = {k: changes.pop(k) for k in list(changes) if k in info}
    return info | own | {"gpu": gpu | changes}


LATER = "2026-12-01T10:10:00Z"


def test_a_quiet_run_is_trusted():
    assert host.trust(snapshot(), snapshot(at=LATER)) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            {},
            {"throttle": ["sw_thermal_slowdown", "gpu_idle"]},
            "held back after the run: sw_thermal_slowdown.",
        ),
        ({"throttle": ["sw_power_cap"]}, {}, "held back before the run: sw_power_cap."),
        ({"throttle": None}, {}, "throttled before the run could not be read"),
        ({"other_processes": None}, {}, "other processes used the GPU before the run could not be read"),
        (
            {},
            {"other_processes": 1, "other_processes_bytes": 2**30},
            "1 other process used .* holding 1024 MiB",
        ),
        ({"other_processes": 2}, {}, "2 other processes"),
        ({"utilization_percent": 37}, {}, "37 % busy before"),
        ({"dirty": True}, {"dirty": True}, "changes that commit aaaaaaa does not hold"),
        ({}, {"dirty": True}, "changes that commit"),
        ({"dirty": None}, {"dirty": None}, "uncommitted changes could not be read"),
        ({}, {"commit": "b" * 40}, "commit changed during the run"),
        ({}, {"source": "t"}, "kernel source changed"),
        ({}, {"driver": "590"}, "driver changed"),
        ({}, {"power_limit_w": 500.0}, "power limit moved by 29% during the run, from 700 to 500 W"),
        ({}, {"name": "NVIDIA H100"}, "GPU changed from NVIDIA H200 to NVIDIA H100"),
        ({}, {"throttle_ns": {"sw_power_cap": 0}}, None),
        ({"throttle_ns": {"sw_power_cap": 0}}, {"throttle_ns": {"sw_power_cap": 30 * 10**9}}, None),
        (
            {"throttle_ns": {"sw_thermal_slowdown": 10**9}},
            {"throttle_ns": {"sw_thermal_slowdown": 301 * 10**9}},
            "spent 300.0 s of the 600 s of the run under sw_thermal_slowdown",
        ),
    ],
)
def test_each_cause_of_distrust_is_a_sentence_with_its_numbers(before, after, said):
    reasons = host.trust(snapshot(**before), snapshot(**({"at": LATER} | after)))
    if said is None:
        assert reasons == []
        return
    assert len(reasons) == 1 and re.search(said, reasons[0])
    assert not reasons[0][0].islower() and reasons[0].endswith(".")


def clocks(sm, memory=3201, throttle=()):
    values = {"sm_mhz": sm, "memory_mhz": memory, "sm_max_mhz": 1980, "memory_max_mhz": 3201}
    return {"clocks": values, "throttle": list(throttle)}


@pytest.mark.parametrize(
    ("before", "after", "distrusted"),
    [
        (clocks(1980), clocks(1900), False),
        (clocks(1980), clocks(1700), True),
        (clocks(1700), clocks(1980), True),
        (clocks(345), clocks(1980), False),  # idle before, at work after
        (clocks(1980), clocks(1200, throttle=["gpu_idle"]), False),
        (clocks(1980, memory=3201), clocks(1980, memory=2000), True),
    ],
)
def test_working_clocks_that_moved_are_distrusted_and_idle_ones_are_not(before, after, distrusted):
    reasons = host.trust(snapshot(**before), snapshot(at=LATER, **after))
    assert bool(reasons) == distrusted
    assert not distrusted or re.search(r"clock moved by \d+% during the run, from \d+ to \d+ MHz", reasons[0])


def test_a_simulated_run_is_judged_by_its_tree_alone():
    quiet = {"at": LATER, "simulated": True, "gpu": None, "commit": "a" * 40, "dirty": False, "source": "s"}
    assert host.trust(quiet, quiet) == []
    assert len(host.trust(quiet, quiet | {"dirty": True})) == 1


def test_a_gpu_that_came_or_went_is_distrusted():
    assert host.trust(snapshot(), snapshot() | {"gpu": None, "simulated": True}) == [
        "A GPU was there at only one end of the run."
    ]


def test_harmless_words_are_words_that_nvml_can_give():
    assert distrust.HARMLESS < set(nvml.EVENTS.values())


def test_the_event_numbers_are_those_of_the_library():
    pynvml = pytest.importorskip("pynvml")
    names = {
        "gpu_idle": "GpuIdle",
        "applications_clocks_setting": "ApplicationsClocksSetting",
        "sw_power_cap": "SwPowerCap",
        "hw_slowdown": "HwSlowdown",
        "sync_boost": "SyncBoost",
        "sw_thermal_slowdown": "SwThermalSlowdown",
        "hw_thermal_slowdown": "HwThermalSlowdown",
        "hw_power_brake": "HwPowerBrakeSlowdown",
        "display_clock_setting": "DisplayClockSetting",
    }
    assert {getattr(pynvml, f"nvmlClocksEventReason{n}"): w for w, n in names.items()} == nvml.EVENTS
    assert nvml.EVENT_COUNTERS == {
        "sw_power_cap": pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP,
        "sw_thermal_slowdown": pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
        "hw_thermal_slowdown": pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
        "hw_power_brake": pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
    }
    # Every call that is made exists under its name.
    for read in re.findall(r"\bn\.(nvml\w+|NVML\w+)", (host.PACKAGE / "measure/nvml.py").read_text()):
        assert hasattr(pynvml, read), read


def test_a_tree_without_git_takes_its_commit_from_the_environment(monkeypatch):
    def no_git(*_):
        raise RuntimeError("git rev-parse ended with status 128")

    monkeypatch.setattr(host, "_git", no_git)
    monkeypatch.setenv("KDTREE_COMMIT", "0123abc-dirty")
    info = host.collect()
    assert (info["commit"], info["dirty"]) == ("0123abc", True)
    monkeypatch.setenv("KDTREE_COMMIT", "not a commit")
    assert host.collect()["commit"] is None


def test_git_is_believed_before_the_environment(monkeypatch):
    monkeypatch.setattr(host, "_git", lambda *words: "f" * 40 if words[0] == "rev-parse" else "")
    monkeypatch.setenv("KDTREE_COMMIT", "0123abc")
    assert host.collect()["commit"] == "f" * 40
