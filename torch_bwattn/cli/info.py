"""Print versions, devices, backends and why any is missing.

Also the variables of this package that are set. Needs no GPU and loads no kernel.
"""

from __future__ import annotations

import argparse
import json
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def collect() -> dict[str, Any]:
    """Everything that is printed, as plain values."""
    from .. import environment

    devices, trouble = _devices()
    return {
        "versions": environment.versions(),
        "driver": environment.driver_version(),
        "devices": devices,
        "devices_trouble": trouble,
        "backends": _backends(),
        "orders": _orders(devices),
        "tables": _tables(devices),
        "variables": environment.variables(),
    }


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    """The CUDA devices, or why they cannot be asked: a broken driver is what one calls `info` for."""
    from .. import environment
    from ..target import cuda_target

    try:
        found = environment.devices()
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
    for device in found:
        major, minor = (int(number) for number in device["capability"].split("."))
        device["target"] = cuda_target(major, minor)
    return found, None


def _backends() -> dict[str, str | None]:
    """Each backend's name, and why it cannot be used here, or None."""
    from ..selection import pin
    from ..selection.choose import get_backend

    found: dict[str, str | None] = {}
    for name in pin.NAMES:
        try:
            found[name] = get_backend(name).missing()
        except Exception as error:  # a backend that does not even load is a finding, not a fault of this command
            found[name] = str(error) or type(error).__name__
    return found


def _orders(devices: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By target: the backends in the order in which they are asked."""
    from ..selection.choose import default_order

    targets = ["cpu", *sorted({device["target"] for device in devices})]
    return {target: list(default_order(target)) for target in targets}


def _tables(devices: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By target: entries of the package's table and of the user's, and whether the package's tests passed there."""
    from ..selection import tables, trust

    found = {}
    for target in sorted({device["target"] for device in devices}):
        found[target] = {
            "package": len(tables.shipped(target).get("entries", [])),
            "user": len(tables.tuned(target).load().get("entries", [])),
            "tested": trust.passed_tests(target),
        }
    return found


def render(found: dict[str, Any]) -> str:
    """The text of `collect`."""
    lines = ["versions"]
    lines += [f"  {name:<20} {version or 'not found'}" for name, version in found["versions"].items()]
    lines.append(f"  {'driver':<20} {found['driver'] or 'not found'}")
    lines.append("devices")
    for device in found["devices"]:
        memory = device["memory_bytes"] / 2**30
        lines.append(
            f"  cuda:{device['index']}  {device['name']}, capability {device['capability']} ({device['target']}), "
            f"{memory:.0f} GiB, {device['multiprocessors']} multiprocessors"
        )
    if not found["devices"]:
        trouble = found["devices_trouble"]
        lines.append(f"  no CUDA device: {trouble}" if trouble else "  no CUDA device; cpu only")
    lines.append("backends")
    for name, missing in found["backends"].items():
        lines.append(f"  {name:<20} {'missing: ' + missing if missing else 'available'}")
    lines.append("order of choice")
    lines += [f"  {target:<20} {', '.join(order)}" for target, order in found["orders"].items()]
    for target, table in found["tables"].items():
        vouched = "have passed" if table["tested"] else "have not passed"
        lines.append(
            f"  {target:<20} measured: {table['package']} kinds and sizes by the package, {table['user']} here"
        )
        lines.append(f"  {'':<20} the package's tests {vouched} on it with these versions")
    lines.append("environment variables")
    lines += [f"  {name}={value}" for name, value in found["variables"].items()]
    if not found["variables"]:
        lines.append("  no BWATTN_* variable is set")
    return "\n".join(lines)


def main(namespace: argparse.Namespace) -> int:
    """Prints."""
    found = collect()
    print(json.dumps(found, indent=1) if namespace.json else render(found))
    return 0
