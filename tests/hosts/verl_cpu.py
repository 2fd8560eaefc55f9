"""A CPU as one of verl's platforms, so that its real worker runs in tests. Import it before anything of verl."""

from __future__ import annotations

import contextlib
import types

import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase


class _Device(types.SimpleNamespace):
    """torch.cuda's functions as far as verl asks for them; any other answers 0."""

    def __getattr__(self, name):
        return lambda *a, **k: 0


DEVICE = _Device(
    get_device_name=lambda *a: "CPU",
    mem_get_info=lambda *a: (8 << 30, 16 << 30),
    is_available=lambda: True,
    current_device=lambda: torch.device("cpu"),
    device_count=lambda: 1,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    manual_seed=torch.manual_seed,
)


@platform_manager.PlatformRegistry.register(platform="cpu")
class CPU(PlatformBase):
    """What verl asks of a platform."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: DEVICE)

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, index):
        pass

    def synchronize(self, index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, index=0):
        return (None, None)

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "CPU"

    def ray_resource_options(self, number):
        return {"num_cpus": number}

    def ray_noset_envvars(self):
        return []

    def rollout_env_vars(self):
        return {}

    def is_ipc_supported(self):
        return False

    @contextlib.contextmanager
    def nvtx_range(self, message):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def cudart(self):
        return None


platform_manager.set_platform(CPU())
