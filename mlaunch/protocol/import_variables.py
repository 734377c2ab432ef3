"""The variables that libraries read while they are loaded. A fork server serves only calls with the same values."""

from __future__ import annotations

from collections.abc import Mapping

# A fork server that loaded its libraries under other values does not fit the call. This lists the variables that C code
# reads, or Python code reads by a prefix; a test asks the loader for all of them. The warm server itself notes what
# Python code reads by name (warm/server/import_record.py).
_READ_AT_IMPORT = (
    "TORCH", "PYTORCH", "KINETO_", "USE_LIBUV", "FX_",
    "OMP_", "GOMP_", "KMP_", "ACC_", "GFORTRAN_",
    "MKL_", "INTEL_", "MKLDNN_", "DNNL_", "ONEDNN_", "OPENBLAS_", "GOTO_", "BLIS_", "NPY_", "NUMPY_",
    "CUBLAS_LOG", "CUBLASLT_LOG", "CUDNN_LOG", "NVIDIA_TF32_OVERRIDE", "OPENSSL_",
    "LD_", "PYTHON", "MALLOC_", "TQDM_",
)  # fmt: skip
_SET_PER_RANK = ("TORCHELASTIC_", "OMP_NUM_THREADS")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of the variables that libraries read while they are loaded."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_SET_PER_RANK)
    }


def replaced(environ: Mapping[str, str], by: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the variables that libraries read while they are loaded taken from ``by``."""
    ours = variables(environ)
    return {name: value for name, value in environ.items() if name not in ours} | variables(by)
