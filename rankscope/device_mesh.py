"""``from rankscope.device_mesh import init_device_mesh``, as torch's programs do."""

from rankscope.backends.groups.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
