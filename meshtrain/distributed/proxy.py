"""Proxies are for the internet, not for what goes from node to node. gRPC, which jax uses, reads their variables."""

from collections.abc import Iterable, Mapping

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC's own order; it knows the small letters alone
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


def proxy_settings(environment: Mapping[str, str], hosts: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """What to set so that gRPC reaches the job's own hosts directly, and what to tell people.

    Args:
        hosts: names and addresses of the job; "" is left out.
    """
    proxies = [name for name in PROXIES if environment.get(name)]
    named = sorted({host for host in hosts if host})
    exceptions = next((name for name in EXCEPTIONS if environment.get(name)), "")
    listed = [each.strip() for each in environment.get(exceptions, "").split(",") if each.strip()]
    missing = [host for host in named if not any(_covers(entry, host) for entry in listed)]
    if not proxies or not missing:
        return {}, []
    name = exceptions or "no_grpc_proxy"
    shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    text = f"{proxies[0]}={environment[proxies[0]]} is set: reaching {shown} without it, as if {name} listed them"
    return {name: ",".join([*listed, *missing])}, [text]


def _covers(entry: str, host: str) -> bool:
    """gRPC's rule: an exception covers the names that end in it."""
    return entry == "*" or host == entry or host.endswith(f".{entry.lstrip('.')}")
