"""SLURM's node lists, expanded as SLURM does; and what is none, refused."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtrain.distributed.nodelist import MAX_HOSTS, expand_node_list
from meshtrain.errors import LaunchError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu-node-a12", "gpu-node-a12"),
        ("gpu-a-[01-02]", "gpu-a-01 gpu-a-02"),
        ("linux[1,2]", "linux1 linux2"),
        ("node[01-03,07]", "node01 node02 node03 node07"),
        ("alpha,beta,gamma", "alpha beta gamma"),
        ("host-[001-002]", "host-001 host-002"),
        ("host[001,003-004,006]", "host001 host003 host004 host006"),
        ("node[7]", "node7"),
        ("n[08-10]", "n08 n09 n10"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[1-2]-ib,login", "n1-ib n2-ib login"),
        ("r[1-2]n[3,5]", "r1n3 r1n5 r2n3 r2n5"),
        ("r[1-2]n[3].site.org", "r1n3.site.org r2n3.site.org"),
        ("r[1n[1-2],2n[5]]x", "r1n1x r1n2x r2n5x"),
        ("a[1-2],b[3,5-6],c", "a1 a2 b3 b5 b6 c"),
        (" a, b", "a b"),
        ("n[0-0]", "n0"),
        ("n[1,1]", "n1 n1"),
        ("2001:db8::1", "2001:db8::1"),
    ],
)
def test_expansion(text: str, hosts: str) -> None:
    assert expand_node_list(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("n[1-3", "a bracket '[' is not closed"),
        ("n1-3]", "a bracket ']' closes nothing"),
        ("n]1[", "a bracket ']' closes nothing"),
        ("n[]", "'' is neither a number nor a range such as 01-16"),
        ("n[1-]", "'1-' is neither a number nor a range"),
        ("n[a-b]", "'a-b' is neither a number nor a range"),
        ("n[1-2-3]", "'1-2-3' is neither"),
        ("n[3-1]", "the range '3-1' runs backwards"),
        ("a,,b", "'' is no host name"),
        ("a;rm -rf /", "'a;rm -rf /' is no host name"),
        ("n[1-2]$(x)", "is no host name"),
        ("n[1-9999999999]", f"more than {MAX_HOSTS} hosts"),
        ("a[1-300]b[1-300]", f"more than {MAX_HOSTS} hosts"),
        ("(null)", "'(null)' is no host name"),
    ],
)
def test_what_is_no_node_list(text: str, problem: str) -> None:
    with pytest.raises(LaunchError) as caught:
        expand_node_list(text)
    assert problem in str(caught.value)


def _range() -> st.SearchStrategy[str]:
    def to_text(first: int, length: int, width: int) -> str:
        return f"{first:0{width}}" + (f"-{first + length:0{width}}" if length else "")

    return st.builds(to_text, st.integers(0, 1200), st.integers(0, 12), st.integers(1, 5))


_words = st.from_regex(r"[a-z]([a-z-]{0,5}[a-z])?", fullmatch=True)
_groups = st.lists(_range(), min_size=1, max_size=3).map(lambda items: f"[{','.join(items)}]")
# What SLURM 22.05 takes: at most two groups, and no text after the last.
_names = st.one_of(
    _words,
    st.builds(lambda word, number: f"{word}{number:02}", _words, st.integers(0, 120)),
    st.builds(lambda word, group: word + group, _words, _groups),
    st.builds(lambda a, g, b, h: a + g + b + h, _words, _groups, _words, _groups),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(_names, min_size=1, max_size=4).map(",".join))
def test_expansion_equals_scontrol(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        pytest.skip("scontrol is not installed")
    conf = Path(tmp_path_factory.getbasetemp()) / "scontrol.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    command = [scontrol, "show", "hostnames", text]
    expected = subprocess.run(command, env={"SLURM_CONF": str(conf)}, capture_output=True, text=True, check=True)
    assert expand_node_list(text) == tuple(expected.stdout.split())
