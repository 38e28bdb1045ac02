"""What the machine has, without asking torch, which takes seconds."""

from pathlib import Path

HAS_GPU = any(Path(path).exists() for path in ("/proc/driver/nvidia", "/dev/nvidiactl"))
"""Not every sandbox shows both."""
