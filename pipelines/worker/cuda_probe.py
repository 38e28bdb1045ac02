"""Whether CUDA works on a GPU, asked of the driver itself: a process of its own, without torch.

nvidia-smi may show a GPU on which no context can be made, with a fabric manager that is down say.
Prints nothing where all is well, else what failed. Run by its path, as it imports nothing of ours.
"""

import ctypes
import sys

MIB = 1 << 20


class Cuda:
    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            what = (text.value or b"unknown error").decode()
            raise RuntimeError(f"{name}: {what} (CUDA error {code})")


def probe(cuda: Cuda, number: int) -> None:
    """A context, some memory, and a byte there and back."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    memory, byte = ctypes.c_ulonglong(), ctypes.c_ubyte()
    cuda("cuDeviceGet", ctypes.byref(device), number)
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxPushCurrent_v2", context)
    cuda("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(MIB))
    cuda("cuMemsetD8_v2", memory, ctypes.c_ubyte(17), ctypes.c_size_t(MIB))
    cuda("cuMemcpyDtoH_v2", ctypes.byref(byte), memory, ctypes.c_size_t(1))
    cuda("cuMemFree_v2", memory)
    cuda("cuDevicePrimaryCtxRelease_v2", device)
    if byte.value != 17:
        raise RuntimeError(f"GPU {number}: memory read back is not what was written")


def main() -> None:
    try:
        cuda, count = Cuda(), ctypes.c_int()
        cuda("cuInit", 0)
        cuda("cuDeviceGetCount", ctypes.byref(count))
        wanted = [int(word) for word in sys.argv[1:]]
        if missing := [number for number in wanted if number >= count.value]:
            raise RuntimeError(f"CUDA shows {count.value} GPUs, GPU {missing[0]} is needed")
        for number in wanted:
            probe(cuda, number)
    except (OSError, AttributeError, RuntimeError) as error:
        print(error)


if __name__ == "__main__":
    main()
