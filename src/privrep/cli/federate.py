"""`privrep federate`: one server, nodes with users of their own, and nothing but bounded sums between them."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from privrep.cli.accounts import open_account
from privrep.cli.command import with_screen
from privrep.cli.config import note_weakness, say_checked
from privrep.cli.console import note, right, say, shout, show, tell, tell_privacy
from privrep.cli.demo import tell_tables
from privrep.cli.ending import stoppable
from privrep.cli.options import ConfigFile, Population, flag
from privrep.errors import InputError, missing_package

if TYPE_CHECKING:
    from privrep.cli.federated_demo import Outcome
    from privrep.federated.config import FederateConfig
    from privrep.federated.task import Task
    from privrep.privacy.population import Account

federate = typer.Typer(
    name="federate",
    help="Learn together, every node keeping its users' rows and heads: a server, its nodes, and the keys for both.",
    no_args_is_help=True,
)

Insecure = Annotated[bool, flag("--insecure", help="Neither TLS nor keys: on loopback alone, to try things out.")]


def keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The server's keys; made if it is not there.")],
    node: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A node that may join; once for each.")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Name or IP address at which nodes find the server, besides this machine."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the nodes' own keys go, a folder each; FOLDER/carry if left out.")
    ] = None,
) -> None:
    """Make the certificate of a server and the keys of its nodes. Called again it adds nodes, or changes the hosts."""
    _need_flower()
    from privrep.federated.credentials import make_keys

    carry, names, hosts = out or folder / "carry", node or [], host or []
    if make_keys(folder, carry, names, hosts):
        say(f"Server: {folder / 'server.pem'}, valid for a year, for localhost{''.join(f', {name}' for name in hosts)}")
    for name in names:
        say(f"Node {name}: carry {carry / name} there over a safe way, and delete it here")
    tell(nodes={name: carry / name for name in names}, hosts=hosts)
    say(f"Keep {folder} to yourself: whoever has ca.key can pose as the server.", folder=folder)


def serve(
    config: ConfigFile,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the model. The same command continues a stopped run.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Folder that `federate keys` made; else server.keys of the config.")
    ] = None,
    insecure: Insecure = False,
    population: Population = None,
    check: Annotated[bool, flag("--check", help="Say whether the config can be used, and do nothing.")] = False,
) -> None:
    """Wait for nodes, learn from the sums they send, and give all of them the public model."""
    if check:
        _check(config)
        return
    if out is None:
        raise InputError("say where the model goes: --out FOLDER.")
    _need_flower(out.with_name(f"{out.name}.federation"))
    from privrep.federated.credentials import read_node_keys, read_server_tls

    asked = _read_checked(config)
    folder, tls, node_keys = keys or asked.keys, None, None
    if insecure:
        _allow_insecure(asked.host)
    elif folder is None:
        raise InputError(
            "say where the keys of server and nodes are, --keys KEYS; make them with: privrep federate keys KEYS "
            "--node NAME"
        )
    else:
        tls, node_keys = read_server_tls(folder, asked.host), read_node_keys(folder)
        note(f"Nodes that may join: {', '.join(node_keys)}")
    from privrep.federated.server import serve as run

    account = _account(population or asked.population, asked.task, out)
    _note_weakness(asked.task)
    again = f"{out} keeps what was done: run the same command to continue; nothing is spent twice, and nodes wait."
    with stoppable(again):
        run(
            asked.task,
            out,
            asked.settings,
            host=asked.host,
            port=asked.port,
            tls=tls,
            node_keys=node_keys,
            say=note,
            on_page=_pages(out),
            on_address=lambda host, port: note(f"Listening at {host}:{port}"),
            account=account,
        )
    _summarise(out, asked.task)


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the server is.")],
    data: Annotated[Path, typer.Option(help="This node's users and their rows: Parquet, CSV or .npz.")],
    folder: Annotated[Path, typer.Option(help="This node's own folder: its model, and its users' heads.")],
    key: Annotated[Path | None, typer.Option(help="This node's node.key, as `federate keys` made it.")] = None,
    ca: Annotated[Path | None, typer.Option(help="The ca.pem that came with it: how the server is known.")] = None,
    agreed: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG.toml", help="The server's configuration, as agreed on: join only if it asks for just that."
        ),
    ] = None,
    simulation: Annotated[
        bool, flag("--simulation", help="Seeded noise will do: NOT PRIVATE. For experiments.")
    ] = False,
    insecure: Insecure = False,
    population: Population = None,
) -> None:
    """Take part with the users of one file. Their rows and heads stay here; clipped sums are what the server gets."""
    _need_flower(folder)
    from privrep.federated.credentials import read_ca, read_node_key

    host = _host(address)
    if insecure:
        if key is not None or ca is not None:
            raise InputError("--insecure uses neither keys nor certificates; leave it, or --key and --ca, out.")
        _allow_insecure(host)
    elif key is None or ca is None:
        raise InputError("say who this node is and how it knows the server: --key node.key --ca ca.pem.")
    else:
        read_node_key(key)
        read_ca(ca)
    if not data.is_file():
        raise InputError(f"there is no file {data}; check the path.")
    from privrep.federated.agreement import Agreement
    from privrep.federated.config import read_config
    from privrep.federated.node import join as run
    from privrep.privacy.population import PopulationLedger

    known = None if agreed is None else read_config(agreed)

    with stoppable(f"run the same command to go on; {folder} keeps what this node has."):
        run(
            address,
            data,
            folder,
            key=key,
            ca=ca,
            insecure=insecure,
            agreed=None if known is None else Agreement.of(known.task, known.settings),
            simulation=simulation,
            population=None if population is None else PopulationLedger(population),
            say=note,
        )
    model = folder / "model"
    say(f"Model: {model}   its users' heads: {model / 'private'} (readable by you alone)", model=model)
    say(f"Predict with: privrep node predict {folder} ROWS --out FILE")


def simulate(
    config: ConfigFile,
    data: Annotated[list[Path], typer.Option(metavar="FILE", help="One file, dealt to --nodes; or one for each node.")],
    out: Annotated[Path, typer.Option(help="Folder to write to. The same command continues a stopped run.")],
    nodes: Annotated[int | None, typer.Option(help="How many nodes share the users of one file.")] = None,
    population: Population = None,
) -> None:
    """Run a whole federation in this process, without a network: the same steps, sums and messages."""
    _need_flower(out.with_name(f"{out.name}.federation"))
    asked = _read_checked(config)
    if len(data) > 1 and nodes is not None and nodes != len(data):
        raise InputError(f"--nodes is for one file; here each of {len(data)} files is a node. Leave it out.")
    missing = next((path for path in data if not path.is_file()), None)
    if missing is not None:
        raise InputError(f"there is no file {missing}; check the path.")
    from privrep.federated.simulation import simulate as run

    _note_weakness(asked.task)
    again = f"{out} keeps what was done: run the same command to continue; nothing is spent twice."
    account = _account(population or asked.population, asked.task, out)
    with tempfile.TemporaryDirectory(prefix="privrep-") as scratch, stoppable(again):
        files = data if len(data) > 1 else _dealt(data[0], asked.task, nodes or 3, Path(scratch))
        run(asked.task, files, out, asked.settings, say=note, on_page=_pages(out), account=account)
    _summarise(out, asked.task)


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write to; it must not be there.")] = Path("federated-demo"),
    overwrite: Annotated[bool, flag("--overwrite", help="Replace an earlier demo there.")] = False,
) -> None:
    """Run one server and three nodes, real processes on loopback with TLS and keys; then show a table of results."""
    _need_flower()
    from privrep.cli.federated_demo import NOTE, run_demo

    with stoppable("the server and the nodes of the demo were stopped, too."):
        outcome = run_demo(out, say=note, overwrite=overwrite)
    show(_table(outcome))
    tell_tables({outcome.title: outcome.table})
    tell(model=outcome.server, nodes=outcome.nodes, rows=outcome.rows)
    say(NOTE)
    say(f"Server's folder, public: {outcome.server}   nodes' folders: {', '.join(map(str, outcome.nodes))}")
    say(f"Next: privrep inspect {outcome.server}")
    say(f"      privrep node predict {outcome.nodes[0]} {outcome.rows} --out predictions.csv")


for _command in (keys, serve, join, simulate, demo):
    federate.command()(with_screen(_command))


# What commands share


def _check(config: Path) -> None:
    """Say whether a configuration can be used; it takes no Flower."""
    asked = _read_checked(config)
    missing = [asked.keys] if asked.keys is not None and not asked.keys.exists() else []
    _note_weakness(asked.task)
    say_checked(config, missing)


def _read_checked(config: Path) -> FederateConfig:
    """Return a configuration; raise InputError for all that a run would refuse, whoever the users are."""
    from privrep.federated.agreement import compute_server_view
    from privrep.federated.config import read_config

    asked = read_config(config)
    compute_server_view(asked.task, asked.settings)
    return asked


def _account(population: Path | None, task: Task, out: Path) -> Account | None:
    """Return the account of a federation; None where no population ledger is named."""
    from privrep.privacy.ledger import Budget

    budget = None if (out / "model.json").is_file() else Budget(task.epsilon, task.delta, task.relation)
    return open_account(population, f"federation into {out.absolute()}", budget, out, seeded=task.seed is not None)


def _note_weakness(task: Task) -> None:
    """Remark on a budget that promises little; how many users there are is not known yet."""
    note_weakness(task.epsilon, task.delta, task.relation)


def _need_flower(folder: Path | None = None) -> None:
    """Raise InputError where Flower is not installed; keep all of its own on this machine and in this run's folder."""
    if importlib.util.find_spec("flwr") is None:
        raise missing_package("federations need Flower", "federated")
    from privrep.federated.wire import silence_flower  # noqa: F401 - settings that Flower reads as it is imported

    if folder is not None:
        os.environ["FLWR_HOME"] = str((folder / "flower").absolute())


def _allow_insecure(host: str) -> None:
    from privrep.federated.credentials import is_loopback

    if not is_loopback(host):
        raise InputError(
            f"--insecure is for loopback alone, 127.0.0.1 or localhost, and {host} is another machine's way in; make "
            "keys with: privrep federate keys KEYS --node NAME"
        )
    shout("INSECURE: no TLS and no keys. Any process on this machine can read along and pose as a node or the server.")


def _host(address: str) -> str:
    """Return the host of HOST:PORT, without the brackets of an IPv6 address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or "/" in host:
        raise InputError(f"the server's address is HOST:PORT, as in 192.0.2.7:9092. Got {address!r} instead.")
    return host.removeprefix("[").removesuffix("]")


def _pages(folder: Path) -> Callable[[str], None]:
    """Return a function that says every page of the billboard and what was spent so far."""
    from privrep.privacy.ledger import read_report

    def page(name: str) -> None:
        spent = read_report(folder / "ledger.jsonl").epsilon
        note(f"{name.replace('-', ' ')}: epsilon {spent:.3f} spent")

    return page


def _dealt(path: Path, task: Task, nodes: int, folder: Path) -> list[Path]:
    from privrep.federated.simulation import split_by_user

    given: dict[str, Any] = task.to_json()
    archive, columns = path.suffix.lower() == ".npz", given["columns"]
    if not archive and columns is None:
        raise InputError(f"the config names no model.columns, as {path} would need; name them, or give a .npz archive.")
    images = given.get("image") is not None
    return split_by_user(path, ("writers" if images else "users") if archive else columns["user"], nodes, folder)


def _summarise(out: Path, task: Task) -> None:
    from privrep.privacy.ledger import read_report

    report = read_report(out / "ledger.jsonl")
    tell_privacy(report)
    say(f"Model: {out}", model=out)
    say(
        f"Privacy: epsilon {report.epsilon:.4g} of {report.epsilon_budget:g} spent, delta {report.delta:g}, "
        f"{report.unit} level, {report.relation}"
    )
    if task.seed is not None:
        shout("SEEDED NOISE: this is a simulation and NOT PRIVATE. Do not publish it.")
    say(f"Nodes keep it, and their users' heads, in folders of their own. What it means: privrep inspect {out}")


def _table(outcome: Outcome) -> Table:
    table = Table("how", "mean squared error", "epsilon", "seconds", title=outcome.title)
    right(table, 1, 2, 3)
    for row in outcome.table:
        epsilon = "no privacy" if row.epsilon is None else f"{row.epsilon:.3g}"
        seconds, style = f"{row.seconds:.1f}" if row.seconds else "", "bold" if row.private else ""
        table.add_row(row.method, f"{row.error:#.3g}", epsilon, seconds, style=style)
    return table
