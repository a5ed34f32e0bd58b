"""Nodes of Ray without those of its processes that nobody here asks: who carries what workers print to drivers, scales
the cluster, and serves its state. Each takes seconds of a core to start, and the first one some of every minute."""

OPTIONS = ("--include-log-monitor=false", "--no-monitor")
"""For `ray start`, which serves the state of the cluster all the same."""


def lean_nodes(set_attribute=setattr):
    """Those that this process starts from now on."""
    from ray._private.node import Node

    set_attribute(Node, "start_log_monitor", lambda node: None)
    set_attribute(Node, "start_monitor", lambda node: None)
    set_attribute(Node, "start_api_server", lambda node, **options: setattr(node, "_webui_url", ""))
