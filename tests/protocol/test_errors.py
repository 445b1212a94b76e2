import pytest

from protocol import errors
from protocol.errors import ExitCode, UserError

LEAVES = UserError.__subclasses__()


def test_a_message_says_what_where_why_and_what_next():
    error = errors.DataError(
        "read the pool", path="pool/a.arrow", why="not Arrow.", hint="Rebuild it."
    )
    assert str(error) == "read the pool: pool/a.arrow: not Arrow. Rebuild it."
    assert (error.what, error.path, error.why) == ("read the pool", "pool/a.arrow", "not Arrow.")


def test_a_message_without_path_and_hint_is_what_and_why():
    assert str(errors.UsageError("start", why="no role")) == "start: no role"


def test_every_class_has_an_exit_code_of_its_own():
    codes = [leaf.exit_code for leaf in LEAVES]
    assert sorted(codes) == [
        ExitCode.USAGE,
        ExitCode.CONFIG,
        ExitCode.DATA,
        ExitCode.REMOTE,
        ExitCode.REFUSED,
        ExitCode.BUSY,
        ExitCode.RUN_FAILED,
    ]


@pytest.mark.parametrize("leaf", LEAVES)
def test_the_tree_at_the_top_of_the_module_names_each_class_with_its_code(leaf: type[UserError]):
    lines = [line for line in (errors.__doc__ or "").splitlines() if f" {leaf.__name__} " in line]
    assert [line.split()[2] for line in lines] == [str(int(leaf.exit_code))]
