"""`check_address`: the addresses of a Dask cluster that can be trusted."""

from __future__ import annotations

import ipaddress

from ...errors import InvalidArgumentError

__all__ = ["check_address"]


def check_address(address: str, what: str) -> None:
    """Raise `InvalidArgumentError` unless an address is of TLS, or of this machine.

    Parameters
    ----------
    address
        As Dask writes it: ``tcp://127.0.0.1:8786``.
    what
        The process with this address, for the error: "the scheduler".
    """
    scheme, _, rest = address.partition("://")
    if scheme == "tls" or (scheme == "tcp" and _is_loopback(rest)):
        return
    if scheme == "inproc":
        raise InvalidArgumentError(
            f"{what} has the address {address}: it is in this process, which cannot be killed and started again. Use "
            "LocalCluster(processes=True, asynchronous=True)",
            address=address,
        )
    raise InvalidArgumentError(
        f"{what} has the address {address}: everything that Dask receives there is trusted and can run code. Use TLS: "
        "pass distributed.security.Security(require_encryption=True, tls_ca_file=…, …) to the cluster and the Client. "
        "On one machine, use tcp://127.0.0.1",
        address=address,
    )


def _is_loopback(rest: str) -> bool:
    host = rest.rpartition(":")[0]
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, which may have more than one address
        return False
