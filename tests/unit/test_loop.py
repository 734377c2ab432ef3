"""The fast loop, ``-m "not slow and not fresh"``: what is in it, and what is not."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType, ModuleType

import pytest

import mlaunch
from mlaunch import comm, launcher
from tests.conftest import COLLECTED, OURS, ROOT
from tests.fresh import globals_of, used_by
from tests.unit.test_house import MODULES


def fast_tests(config: pytest.Config) -> list[pytest.Item]:
    items = config.stash[COLLECTED]
    if {item.path for item in items} < set((ROOT / "tests").rglob("test_*.py")):
        pytest.skip("only a part of the suite was collected")
    return [item for item in items if not any(map(item.get_closest_marker, ("slow", "fresh", "nightly")))]


def named_by(item: pytest.Item) -> set[str]:
    """The modules of the package whose functions, classes or constants a test uses by name."""
    found = set()
    for function in used_by(item):
        for name, value in globals_of(function):
            if isinstance(value, ModuleType):
                found.add(value.__name__)
            else:
                found |= {name, str(getattr(value, "__module__", ""))}
    return found


def called(run: Callable[[], object], fd: int) -> set[str]:
    """The modules of which a function is called meanwhile, here or in a fork of this process."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        file = code.co_filename
        if event == "call" and file.startswith(OURS) and file not in seen and code.co_flags & inspect.CO_OPTIMIZED:
            seen.add(file)
            os.write(fd, f"mlaunch.{file.removeprefix(OURS).removesuffix('.py').replace(os.sep, '.')}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return {name.removesuffix(".__init__") for name in os.pread(fd, 1 << 20, 0).decode().split()}


def has_code(module: str) -> bool:
    """False for a package that has only modules."""
    path = ROOT / module.replace(".", "/")
    return not path.is_dir() or "\ndef " in (path / "__init__.py").read_text(encoding="utf-8")


def all_that_a_rank_does() -> None:
    def train() -> None:
        comm.create_local_process_group()
        comm.reduce_dict({"loss": 1.0})
        comm.synchronize()
        mlaunch.group_barrier()
        mlaunch.get_client().user_set("key", threading.Lock)
        if comm.get_rank() == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("no such luck")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is started again
        launcher(train, 2, start_method="fork", max_restarts=1)()
    stay_for_a_failure()


def stay_for_a_failure() -> None:
    def fail(_: object) -> None:
        raise ValueError("no such luck")

    with mlaunch.Ranks(n_gpus=2, start_method="fork") as ranks:
        held = ranks.hold(dict)
        with pytest.raises(ValueError, match="no such luck"):
            ranks.run(fail, mlaunch.scatter([held, held]))


# What no fast test names, with one that cannot pass without it.
INSIDE = {
    "mlaunch.__main__": "test_the_modules_that_are_commands",
    "mlaunch._version": "test_the_version",
    "mlaunch.cli": "test_completion",
    "mlaunch.base.ported_names": "test_a_name_of_another_launcher_says_what_to_use",
    "mlaunch.debug.caller": "test_the_lines_may_come_from_a_program",
    "mlaunch.debug.rank": "test_the_lines_may_come_from_a_program",
    "mlaunch.debug.caller.asking": "test_the_lines_may_come_from_a_program",
    "mlaunch.debug.rank.rank_pdb": "test_the_lines_may_come_from_a_program",
    "mlaunch.debug.caller.visiting": "test_without_an_id",
    "mlaunch.caller.inline": "test_a_call_in_this_process",
    "mlaunch.core.records": "test_steps_that_the_function_counts",
    "mlaunch.core.load": "test_steps_that_the_function_counts",
    "mlaunch.core.parts": "test_steps_that_the_function_counts",
    "mlaunch.profile.caller": "test_steps_that_the_function_counts",
    "mlaunch.profile.rank": "test_steps_that_the_function_counts",
    "mlaunch.profile.wire": "test_steps_that_the_function_counts",
    "mlaunch.caller.options.option_fields": "test_every_option_is_in_help_and_on_the_page",
    "mlaunch.compat.caller": "test_launch",
    "mlaunch.protocol.launch_files": "test_files",
    "mlaunch.display.caller.timeline": "test_the_report_of_a_call",
    "mlaunch.display.rank": "test_bars_in_ranks_are_text",
    "mlaunch.cells.caller": "test_names_go_to_and_fro",
    # Which thread drives it, and whether that is looked at, is chance.
    "mlaunch.ranks.caller.kept_handle": "test_values_come_by_rank_and_the_processes_stay",
    "mlaunch.cells.kernel": "test_the_magics",
    "mlaunch.cells.rank": "test_a_cell_is_ipythons",
    "mlaunch.cells.rank.shell": "test_a_cell_is_ipythons",
    "mlaunch.caller.warm_up": "test_the_first_launch_can_be_prepared_too",
    "mlaunch.engines": "test_machines_that_are_held",
    "mlaunch.engines.caller.engine_launch": "test_machines_that_are_held",
    "mlaunch.engines.caller.cluster": "test_machines_that_are_held",
    "mlaunch.engines.caller.kept_launch": "test_an_exception_on_one_machine_leaves_them_in_step",
    "mlaunch.sweeps.caller.submitted_call": "test_futures_of_launches",
    "mlaunch.sweeps.caller.kept_trial": "test_trials_take_the_warm_ranks_of_their_devices",
    "mlaunch.insight.agent": "test_each_trial_has_machines_of_its_own",
    "mlaunch.insight.command": "test_the_command_alone_lists_its_commands",
    "mlaunch.sweeps.caller.run_future": "test_futures_of_launches",
    "mlaunch.sweeps.caller": "test_futures_of_launches",
    "mlaunch.sweeps.caller.sweep": "test_a_map_and_a_grid",
    "mlaunch.sweeps.caller.trial": "test_a_map_and_a_grid",
    "mlaunch.engines.caller.engine": "test_other_mistakes",
    "mlaunch.engines.member.machine_launch": "test_heartbeats_are_sent",
    "mlaunch.engines.caller.machines": "test_machines_that_are_held",
    "mlaunch.engines.member.member": "test_machines_that_are_held",
    "mlaunch.engines.wire": "test_machines_that_are_held",
    "mlaunch.engines.caller.merged_agent": "test_machines_that_are_held",
    "mlaunch.engines.caller.placement": "test_machines_that_are_held",
    "mlaunch.launch": "test_the_modules_that_are_commands",
    "mlaunch.protocol.this_rank": "test_a_launch_inside_a_rank_that_was_not_meant",
    # Tests with the mark run by these.
    "mlaunch.pytest.rank.run_test": "test_who_am_i",
    "mlaunch.pytest.caller.sent_tests": "test_who_am_i",
    "mlaunch.pytest.rank.explanation": "test_who_am_i",
    "mlaunch.pytest.rank.fixtures_of_rank": "test_who_am_i",
    "mlaunch.pytest.rank.hypothesis_draws": "test_who_am_i",
    "mlaunch.pytest.caller.judgement": "test_who_am_i",
    "mlaunch.pytest.rank.isolation": "test_who_am_i",
    "mlaunch.pytest.caller.mark": "test_who_am_i",
    "mlaunch.pytest": "test_who_am_i",
    "mlaunch.pytest.plugin": "test_who_am_i",
    "mlaunch.pytest.caller.runner": "test_who_am_i",
    "mlaunch.pytest.caller.shared_ranks": "test_who_am_i",
    "mlaunch.pytest.rank.unittest_cases": "test_a_method_raises_what_was_wrong_first",
    "mlaunch.rank.become_rank": "test_join_refuses",
    "mlaunch.compat.rank.join": "test_join_refuses",
    "mlaunch.events.caller": "test_spans_of_opentelemetry",
    "mlaunch.machines.agent": "test_two_machines_that_are_threads",
    "mlaunch.machines.link": "test_two_machines_that_are_threads",
    "mlaunch.machines.gate": "test_two_machines_that_are_threads",
    "mlaunch.rendezvous.store_client": "test_ranks_share_the_launchs_own_server",
    "mlaunch.numa.rank": "test_ranks_that_stay_on_nodes",
    "mlaunch.run.__main__": "test_the_modules_that_are_commands",
    "mlaunch.run.rank": "test_a_script_is_main",
    "mlaunch.run.wire": "test_a_script_is_main",
    "mlaunch.machines.caller": "test_two_machines_that_are_threads",
    "mlaunch.debug.command": "test_without_an_id",
    "mlaunch.debug.rank.breakpoints": "test_the_lines_may_come_from_a_program",
    "mlaunch.slow.agent": "test_a_short_call",
    "mlaunch.slow.caller": "test_a_short_call",
    "mlaunch.slow.rank": "test_a_short_call",
    "mlaunch.torch_parts.model_times": "test_a_short_call",
    "mlaunch.warm.command": "test_wrong_command_lines",
}
# A member that is a process is a fresh interpreter, as is a fork server that outlives its caller, and a command with a
# terminal that attaches to ranks: test_engine_parts.py, test_warm.py and test_attaching.py run these. What torch lacks
# is tried by test_lacking_torch_parts.py, in processes from which its names are taken.
FRESH = {"mlaunch.engines.member.main", "mlaunch.warm.caller.zygotes", "mlaunch.warm.wire.zygote_messages"}
FRESH |= {"mlaunch.debug.rank.visit"}
FRESH |= {"mlaunch.profile.member"}  # of a profile on machines: torch's profiler alone takes seconds to import
FRESH |= {"mlaunch.torch_parts.lacking", "mlaunch.warm.server"}


def test_every_module_is_in_the_fast_loop(request: pytest.FixtureRequest) -> None:
    """By the name of what a fast test uses; or in these calls, of which all processes are forks of this one."""
    fast = fast_tests(request.config)
    assert set(INSIDE.values()) <= {getattr(item, "originalname", "") for item in fast}
    named = set().union(*map(named_by, fast))
    fd = os.memfd_create("called")
    os.set_inheritable(fd, True)
    reached = called(all_that_a_rank_does, fd)
    os.close(fd)
    code = {module for module in MODULES if has_code(module)}
    assert len(reached) > 20
    assert not (left := sorted(code - named - reached - INSIDE.keys() - FRESH)), " ".join(left)
    assert not (stale := (INSIDE.keys() | FRESH) - code), stale
