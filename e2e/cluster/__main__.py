"""python -m cluster: the local Kubernetes, from the command line."""

from __future__ import annotations

import argparse
import subprocess
import sys

from cluster import lifecycle, network
from cluster.addresses import node_number
from cluster.keys import kubeconfig
from cluster.nodes import enter


def main() -> None:
    """See --help."""
    parser = argparse.ArgumentParser(prog="python -m cluster", description="A real Kubernetes on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="bring it up").add_argument("--nodes", type=int, default=3)
    down = commands.add_parser("down", help="take it away")
    down.add_argument("--wipe", action="store_true", help="images on the nodes too")
    load = commands.add_parser("load", help="put images on all nodes")
    load.add_argument("images", nargs="+", help="an archive (FILE.tar), or the name of what buildah built here")
    of_a_node = {
        "cut-power": "end a node at once",
        "restore-power": "start it again",
        "freeze": "stop all its processes",
        "thaw": "let them go on",
    }
    for name, text in of_a_node.items():
        commands.add_parser(name, help=text).add_argument("node")
    partition = commands.add_parser("partition", help="let nothing pass between two nodes, or a node and `host`")
    partition.add_argument("one")
    partition.add_argument("other")
    commands.add_parser("reconnect", help="end all partitions")
    commands.add_parser("kubeconfig", help="print its path")
    within = commands.add_parser("exec", help="run a command on a node")
    within.add_argument("node")
    within.add_argument("words", nargs=argparse.REMAINDER)
    _act(parser.parse_args())


def _act(arguments: argparse.Namespace) -> None:
    match arguments.command:
        case "up":
            lifecycle.up(arguments.nodes)
        case "down":
            lifecycle.down(wipe=arguments.wipe)
        case "load":
            lifecycle.load_images(arguments.images)
        case "cut-power":
            lifecycle.cut_power(arguments.node)
        case "restore-power":
            lifecycle.restore_power(arguments.node)
        case "freeze":
            lifecycle.freeze(arguments.node)
        case "thaw":
            lifecycle.thaw(arguments.node)
        case "partition":
            network.partition(arguments.one, arguments.other)
        case "reconnect":
            network.reconnect()
        case "kubeconfig":
            print(kubeconfig())
        case "exec":
            words = [*enter(node_number(arguments.node)), *arguments.words]
            sys.exit(subprocess.run(words, check=False).returncode)


if __name__ == "__main__":
    main()
