"""Which variables libraries read as they are loaded: a fork server serves calls that have the same."""

from __future__ import annotations

from collections.abc import Mapping

# Read once, by libraries as they are loaded: a fork server that loaded them under other values is of no use. Here stand
# those that C code reads, or Python code by a prefix; a test asks the loader for all. What Python code reads by name, a
# server that is kept notes for itself (warm/server/import_record.py).
_READ_AT_IMPORT = (
    "TORCH", "PYTORCH", "KINETO_", "USE_LIBUV", "FX_",
    "OMP_", "GOMP_", "KMP_", "ACC_", "GFORTRAN_",
    "MKL_", "INTEL_", "MKLDNN_", "DNNL_", "ONEDNN_", "OPENBLAS_", "GOTO_", "BLIS_", "NPY_", "NUMPY_",
    "CUBLAS_LOG", "CUBLASLT_LOG", "CUDNN_LOG", "NVIDIA_TF32_OVERRIDE", "OPENSSL_",
    "LD_", "PYTHON", "MALLOC_", "TQDM_",
)  # fmt: skip
_SET_PER_RANK = ("TORCHELASTIC_", "OMP_NUM_THREADS")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read when they are loaded."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_SET_PER_RANK)
    }


def replaced(environ: Mapping[str, str], by: Mapping[str, str]) -> dict[str, str]:
    """Return variables with those in the place that libraries read when they are loaded."""
    ours = variables(environ)
    return {name: value for name, value in environ.items() if name not in ours} | variables(by)
