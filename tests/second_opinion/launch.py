"""One launch on the simulator, in a process of its own: `launch.py FOLDER`, where job and arrays lie.

Imports nothing of ksgen.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
CAPABILITY = 90  # of the GPU that is simulated


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    lib, pointer = ctypes.CDLL(job["library"]), ctypes.c_void_p
    lib.cudaMalloc.argtypes = [ctypes.POINTER(pointer), ctypes.c_size_t]
    lib.cudaMemcpy.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int]
    lib.sim_load_ptx.argtypes, lib.sim_load_ptx.restype = [ctypes.c_char_p, ctypes.c_uint], ctypes.c_uint
    lib.sim_register.argtypes = [ctypes.c_uint, pointer, ctypes.c_char_p]
    lib.sim_launch.argtypes = [pointer, *[ctypes.c_uint] * 6, ctypes.c_size_t, ctypes.POINTER(pointer)]
    places = []
    for number, (nbytes, past) in enumerate(job["arrays"]):
        memory, data = pointer(), (folder / f"{number}.bin").read_bytes()
        lib.cudaMalloc(ctypes.byref(memory), nbytes + 16)
        places.append(pointer((memory.value or 0) + past))
        lib.cudaMemcpy(places[-1], data, nbytes, HOST_TO_DEVICE)
    values = [
        places[what] if kind == "array" else ctypes.create_string_buffer(bytes.fromhex(what))
        for kind, what in job["arguments"]
    ]
    given = (pointer * len(values))(*[ctypes.addressof(value) for value in values])
    handle = lib.sim_load_ptx(job["ptx"].encode(), CAPABILITY)
    key = ctypes.create_string_buffer(b"the kernel")
    lib.sim_register(handle, ctypes.addressof(key), job["entry"].encode())
    lib.sim_launch(ctypes.addressof(key), job["grid"], 1, 1, job["block"], 1, 1, job["shared_bytes"], given)
    for number, (nbytes, _) in enumerate(job["arrays"]):
        data = ctypes.create_string_buffer(nbytes)
        lib.cudaMemcpy(data, places[number], nbytes, DEVICE_TO_HOST)
        (folder / f"{number}.bin").write_bytes(data.raw)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # the simulator has threads that never end
