"""NVIDIA's library (NVML) without a driver: it lists the processes that the files of a folder say.

``NVML_LISTED`` names the folder; in ``compute`` and ``graphics`` each line is a device, a process and its bytes. Each
question reads them again. A script loads it by ``ctypes.CDLL(os.environ["NVML"])`` before it asks: from then on the
loader knows the name by which the package asks for it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.libraries import needs

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned pid; unsigned long long size; unsigned instance, part; } Process;
static int begin(void) { return getenv("NO_DRIVER") ? 9 : 0; }
int nvmlInit_v2(void) { return begin(); }
int nvmlInitWithFlags(unsigned flags) { return begin(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "Driver Not Loaded"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = strdup(uuid); return 0; }
static int processes(const char *name, const char *uuid, unsigned *count, Process *found) {
    char path[4096], device[100];
    unsigned there = 0, room = *count;
    Process one = {0};
    snprintf(path, sizeof path, "%s/%s", getenv("NVML_LISTED"), name);
    FILE *file = fopen(path, "r");
    while (file && fscanf(file, "%99s %u %llu", device, &one.pid, &one.size) == 3)
        if (!strcmp(device, uuid) && there++ < room) found[there - 1] = one;
    if (file) fclose(file);
    *count = there;
    return there > room ? 7 : 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, void *i) { return processes("compute", d, n, i); }
#ifndef OLD
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *d, unsigned *n, void *i) { return processes("graphics", d, n, i); }
#endif
"""


def build(folder: Path, *flags: str) -> Path:
    """Return the library; skips where there is no compiler, or no package that would ask it.

    "-DOLD": it is older than the package.
    """
    needs("pynvml")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    path = folder / "nvml.so"
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libnvidia-ml.so.1", "-x", "c", "-", *flags, "-o", str(path)]
    subprocess.run(command, input=SOURCE.encode(), check=True)
    return path
