"""What other launchers call the options of this one, for people who come from there."""

from __future__ import annotations

from collections.abc import Sequence

_OPTIONS = {
    "n_gpus": "nproc_per_node nproc nprocs num_processes num_procs num_gpus num_gpus_per_machine num_gpus_per_node "
    "gpus_per_node workers_per_host workers_per_node num_ranks",
    "port": "master_port use_port main_process_port rdzv_port",
    "master_ip": "master_addr main_process_ip rdzv_host",
    "master_ip= and port": "dist_url init_method rdzv_endpoint",
    "device_type": "accelerator device",
    "devices": "gpu_ids device_ids cuda_visible_devices visible_devices",
    "env": "env_vars extra_env_vars environment",
    "output= and log_dir": "tee redirects logs_specs",
    "start_method": "mp_context",
    "grace_period": "shutdown_timeout",
}
_OTHERWISE = {
    "each machine says world_size= and rank_start=, counted in ranks; with engine=, machines= says how many": "nnodes "
    "num_nodes num_machines num_hosts nodes node_rank machine_rank",
    "machines are reached by engine=, such as mlaunch.engines.Hosts([...])": "hostnames hosts hostfile",
    "how a model is spread over ranks is the function's own business (DistributedDataParallel, FSDP)": "strategy "
    "distributed_type",
    "precision is the function's own business (torch.autocast)": "mixed_precision precision amp",
    "the decorated function is called with its arguments": "args kwargs fn_args",
    "a call returns when all ranks have; Ranks.submit goes on meanwhile": "daemon",
}


def answer(name: str) -> str:
    """Says what stands here for an option of another launcher; "" for a name that none has."""
    for option, names in _OPTIONS.items():
        if name in names.split():
            return f"; here that is {option}="
    return next((f"; {said}" for said, names in _OTHERWISE.items() if name in names.split()), "")


def advice(name: str, names: Sequence[str]) -> str:
    """Returns what to add to "no option of that name": ours for a peer's name, the nearest one, or where all are."""
    import difflib  # for this alone

    if found := answer(name):
        return found
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; help(launcher) lists what there is"
