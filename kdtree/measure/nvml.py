"""What the driver says about the current GPU, through NVML and the CUDA driver API.

Every function raises what the libraries raise; `host.collect` turns that into `missing`. None creates a CUDA
context. Importing this module imports neither library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# NVML's clock event bits -> words.
EVENTS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x10: "sync_boost",
    0x100: "display_clock_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
# NVML fields that count the nanoseconds spent under an event since the driver was loaded.
EVENT_COUNTERS = {
    "sw_power_cap": 74,
    "sw_thermal_slowdown": 269,
    "hw_thermal_slowdown": 270,
    "hw_power_brake": 271,
}


def gpu_memory() -> tuple[int, int]:
    """(free, used) bytes of the current GPU by NVML, whoever uses them. Raises what NVML raises."""
    with Nvml() as nvml:
        memory = nvml.nvmlDeviceGetMemoryInfo(device_handle(nvml))
        return int(memory.free), int(memory.used)


class Nvml:
    """pynvml between nvmlInit and nvmlShutdown."""

    def __enter__(self) -> Any:
        import pynvml

        pynvml.nvmlInit()
        self._module = pynvml
        return pynvml

    def __exit__(self, *exc: object) -> None:
        self._module.nvmlShutdown()


def clocks_mhz(n: Any, h: Any) -> dict[str, int]:
    """Clocks in MHz: of this moment, and the highest there are."""
    return {
        "sm_mhz": n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
        "memory_mhz": n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM),
        "sm_max_mhz": n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM),
        "memory_max_mhz": n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_MEM),
    }


def throttle_words(bits: int) -> list[str]:
    """NVML's clock event bits as words, in bit order; a bit without a word shows as hex."""
    return [EVENTS.get(bit, hex(bit)) for bit in (1 << i for i in range(64)) if bits & bit]


def event_bits(n: Any, h: Any) -> int:
    """Why the clocks are what they are at this moment, as NVML's bits."""
    try:
        return int(n.nvmlDeviceGetCurrentClocksEventReasons(h))
    except (AttributeError, n.NVMLError_FunctionNotFound):  # drivers before 535, and their bindings
        return int(n.nvmlDeviceGetCurrentClocksThrottleReasons(h))


def event_counters(n: Any, h: Any) -> dict[str, int]:
    """Nanoseconds under each event, those that this driver counts."""
    values = n.nvmlDeviceGetFieldValues(h, list(EVENT_COUNTERS.values()))
    return {
        word: int(value.value.ullVal)
        for word, value in zip(EVENT_COUNTERS, values, strict=True)
        if value.nvmlReturn == n.NVML_SUCCESS and value.valueType == n.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    }


def others(n: Any, h: Any) -> list[Any]:
    """Compute processes on the GPU that are neither this one, nor its ancestors, nor its descendants.

    A desktop that draws is none: it would distrust every workstation for good, and shows as utilisation when
    busy.
    """
    import psutil

    running = list(n.nvmlDeviceGetComputeRunningProcesses(h))
    me = psutil.Process()
    family = {me.pid, *(p.pid for p in (*me.parents(), *me.children(recursive=True)))}
    strange = [p for p in running if p.pid not in family]
    # In a container NVML reports the pids of the machine: if we hold a context, one of the strangers is us.
    unrecognised = strange and len(strange) == len(running) and _holds_context()
    return strange[1:] if unrecognised else strange


def _holds_context() -> bool:
    """True when this process has a CUDA context, asked without making one."""
    from cuda.bindings import driver

    _, active = _cu(driver.cuDevicePrimaryCtxGetState(_cu(driver.cuDeviceGet(_ordinal()))))
    return bool(active)


def device_handle(n: Any) -> Any:
    """NVML's handle of CUDA's current device. They number devices differently, so ask by PCI bus."""
    from cuda.bindings import driver

    _cu(driver.cuInit(0))
    bus = _cu(driver.cuDeviceGetPCIBusId(32, _cu(driver.cuDeviceGet(_ordinal()))))
    return n.nvmlDeviceGetHandleByPciBusId(bus.split(b"\0")[0].decode())


def _ordinal() -> int:
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0


def _cu(result: tuple[Any, ...]) -> Any:
    """The values of a driver call, or RuntimeError with the name of its status."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"the CUDA driver answered {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def driver_attributes() -> dict[str, Any]:
    """Those of ATTRIBUTES, as CUDA sees the device: under MIG that is the slice."""
    from cuda.bindings import driver

    _cu(driver.cuInit(0))
    device = _cu(driver.cuDeviceGet(_ordinal()))

    def get(name: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_cu(driver.cuDeviceGetAttribute(attribute, device)))

    return {
        "compute_capability": f"{get('COMPUTE_CAPABILITY_MAJOR')}.{get('COMPUTE_CAPABILITY_MINOR')}",
        "sm_count": get("MULTIPROCESSOR_COUNT"),
        "l2_bytes": get("L2_CACHE_SIZE"),
        "shared_per_block_bytes": get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    }


def driver_version() -> str:
    """Version of the driver, for example "580.159.04"."""
    with Nvml() as n:
        return str(n.nvmlSystemGetDriverVersion())


def cuda_version() -> str:
    """The CUDA version that the driver supports."""
    from cuda.bindings import driver

    version = int(_cu(driver.cuDriverGetVersion()))
    return f"{version // 1000}.{version % 1000 // 10}"


# Fields of host.json's `gpu` from the CUDA driver.
ATTRIBUTES = ("compute_capability", "sm_count", "l2_bytes", "shared_per_block_bytes")

# Fields of host.json's `gpu` from NVML, and how each is read from pynvml and a device.
FIELDS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda n, h: n.nvmlDeviceGetName(h),
    "memory_bytes": lambda n, h: int(n.nvmlDeviceGetMemoryInfo(h).total),
    "memory_used_bytes": lambda n, h: int(n.nvmlDeviceGetMemoryInfo(h).used),
    "clocks": clocks_mhz,
    "power_w": lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1e3,
    "power_limit_w": lambda n, h: n.nvmlDeviceGetPowerManagementLimit(h) / 1e3,
    "power_limit_default_w": lambda n, h: n.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1e3,
    "temperature_c": lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    "ecc": lambda n, h: bool(n.nvmlDeviceGetEccMode(h)[0]),
    "mig": lambda n, h: bool(n.nvmlDeviceGetMigMode(h)[0]),
    "throttle": lambda n, h: throttle_words(event_bits(n, h)),
    "throttle_ns": event_counters,
    "utilization_percent": lambda n, h: int(n.nvmlDeviceGetUtilizationRates(h).gpu),
    "other_processes": lambda n, h: len(others(n, h)),
    "other_processes_bytes": lambda n, h: sum(p.usedGpuMemory or 0 for p in others(n, h)),
}

# What some GPUs do not have at all: null then, and no gap. Without the rest nobody can say if a time is good.
OPTIONAL = {
    "ecc",
    "mig",
    "throttle_ns",
    "power_w",
    "power_limit_default_w",
    "temperature_c",
    "utilization_percent",
}
