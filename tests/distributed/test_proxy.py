"""Proxy variables: what goes between the job's own hosts does not take them, and people hear of it."""

import pytest

from meshtrain.distributed.proxy import proxy_settings

PROXY = {"https_proxy": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("env", "hosts", "settings"),
    [
        ({}, ["head"], {}),
        ({"HTTP_PROXY": "http://proxy"}, ["head"], {}),  # gRPC reads the small letters alone
        (PROXY, ["head", "10.0.0.1", ""], {"no_grpc_proxy": "10.0.0.1,head"}),
        (PROXY | {"no_proxy": "head"}, ["head"], {}),
        (
            PROXY | {"no_proxy": "localhost, .cluster"},
            ["gpu1.cluster", "head"],
            {"no_proxy": "localhost,.cluster,head"},
        ),
        (PROXY | {"no_proxy": "cluster"}, ["gpu1.cluster"], {}),
        (PROXY | {"no_proxy": "luster"}, ["gpu1.cluster"], {"no_proxy": "luster,gpu1.cluster"}),
        (PROXY | {"no_grpc_proxy": "a", "no_proxy": "head"}, ["head"], {"no_grpc_proxy": "a,head"}),
        (PROXY | {"no_proxy": "*"}, ["head"], {}),
        ({"grpc_proxy": "http://p", "no_grpc_proxy": "*"}, ["head"], {}),
    ],
)
def test_the_jobs_hosts_are_reached_directly(env: dict[str, str], hosts: list[str], settings: dict[str, str]) -> None:
    found, warnings = proxy_settings(env, hosts)
    assert found == settings
    assert len(warnings) == bool(settings)


def test_the_warning_names_the_variable_its_value_and_the_hosts() -> None:
    _, (warning,) = proxy_settings(PROXY, [f"gpu{i}" for i in range(6)])
    assert warning == (
        "https_proxy=http://proxy:3128 is set: reaching gpu0, gpu1, gpu2, gpu3 and 2 more without it, as if "
        "no_grpc_proxy listed them"
    )
