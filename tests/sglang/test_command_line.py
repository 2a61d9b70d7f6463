"""How the command line of SGLang's servers takes the policies and the flags, and refuses them.

It is parsed as ``python -m sglang.launch_server`` does it, by the same two calls: ``load_plugins``, then
``prepare_server_args``. What happens without the plugin is seen in test_scheduler.py, in a process of its own.
"""

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


@pytest.fixture
def refused(capsys):
    """Parse flags that end start-up; returns the exit status, what was printed, and what was printed as an error."""
    load_plugins()

    def parse(*flags):
        with pytest.raises(SystemExit) as ended:
            prepare_server_args(["--model-path", "/no/such/model", *flags])
        return ended.value.code, *capsys.readouterr()

    return parse


def test_help_lists_the_policies_and_flags(refused):
    status, shown, _ = refused("--help")
    assert status == 0
    for word in ("feather-heuristic", "feather-order", "--feather-policy-file", "--feather-max-wait", "--feather-seed"):
        assert word in shown


def test_a_bad_flag_ends_start_up_with_one_line(refused):
    status, _, error = refused("--schedule-policy", "feather", "--feather-chunk-size", "0")
    assert status == 2
    assert "argument --feather-chunk-size: '0': expected a whole number of at least 1" in error


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--attention-backend", "pat", "--decode-attention-backend", "triton"), "drop one of the two"),
        (("--attention-backend", "pat", "--decode-attention-backend", "fa3"), "pat decodes only"),
    ],
)
def test_backends_that_contradict_each_other_end_start_up_with_one_line(capsys, flags, says):
    load_plugins()
    with pytest.raises(SystemExit) as ended:
        prepare_server_args(["--model-path", "/no/such/model", *flags]).resolve_once()  # once made, in older releases
    error = capsys.readouterr().err
    (line,) = (line for line in error.splitlines() if "feather: error: --attention-backend pat" in line)
    assert ended.value.code == 1 and says in line and "Traceback" not in error
