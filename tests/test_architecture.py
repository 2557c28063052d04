"""One place for noise, one for clipping, one for spending: read off the syntax trees of all of src/privrep.

What may happen where is written once, in RULES; a new exception is a line there, with its reason. The last tests feed
the rules code that breaks them, so that a rule which no longer sees anything is noticed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

_spec = importlib.util.find_spec("privrep")
assert _spec is not None
assert _spec.origin is not None
SOURCE = Path(_spec.origin).parent
MODULES = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}

Finder = Callable[[ast.AST], Iterator[tuple[int, str]]]
"""Yields (line, what was found) for every place in a tree where something happens."""


@dataclass(frozen=True)
class Rule:
    """What `find` finds may happen only in these files, or in folders (ending in a slash), under src/privrep."""

    find: Finder
    allowed: tuple[str, ...]

    def broken_by(self, name: str, tree: ast.AST) -> list[str]:
        if any(name == place or (place.endswith("/") and name.startswith(place)) for place in self.allowed):
            return []
        return [f"{name}:{line}: {found}" for line, found in self.find(tree)]


@cache
def parse(path: Path) -> ast.Module:
    """Parse a file once: every rule looks at all files."""
    return ast.parse(path.read_text())


@cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def _dotted(node: ast.AST) -> str:
    """a.b.c of an attribute chain; what is not a name at its root is left out."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def _called(node: ast.AST) -> str:
    """The last name of what is called: charge for ledger.charge(...) and for charge(...)."""
    return _dotted(node.func).rsplit(".", 1)[-1] if isinstance(node, ast.Call) else ""


def calls(*names: str) -> Finder:
    def find(tree: ast.AST) -> Iterator[tuple[int, str]]:
        for node in walk(tree):
            if isinstance(node, ast.Call) and _called(node) in names:
                yield node.lineno, f"calls {_called(node)}"

    return find


def reads(*attributes: str) -> Finder:
    def find(tree: ast.AST) -> Iterator[tuple[int, str]]:
        for node in walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in attributes and isinstance(node.ctx, ast.Load):
                yield node.lineno, f"reads .{node.attr}"

    return find


def defines(*words: str) -> Finder:
    def find(tree: ast.AST) -> Iterator[tuple[int, str]]:
        for node in walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and any(word in node.name.lower() for word in words):
                yield node.lineno, f"defines {node.name}"

    return find


def imports(*modules: str) -> Finder:
    """Imports of these modules or anything in them, and names taken from them."""

    def find(tree: ast.AST) -> Iterator[tuple[int, str]]:
        for node in walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if any(name == module or name.startswith(module + ".") for module in modules):
                    yield node.lineno, f"imports {name}"

    return find


def constructs(name: str) -> Finder:
    return calls(name)


def _random(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every way to a random number: NumPy's generators, the random and secrets modules, OpenDP, os.urandom, torch."""
    draws = {"normal", "standard_normal", "laplace", "gumbel", "exponential", "integers", "uniform", "choice", "random"}
    draws |= {"permutation", "permuted", "shuffle", "poisson", "binomial", "standard_t", "randn", "rand", "randint"}
    draws |= {"randn_like", "rand_like", "randint_like", "randperm", "bernoulli", "multinomial", "normal_", "uniform_"}
    draws |= {"bernoulli_", "exponential_", "random_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_"}
    draws |= {"xavier_uniform_", "trunc_normal_", "orthogonal_", "dropout", "dropout1d", "dropout2d", "alpha_dropout"}
    draws |= {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "rrelu", "gumbel_softmax"}
    makers = {"default_rng", "RandomState", "Generator", "SeedSequence", "PCG64", "Philox", "urandom", "getrandom"}
    makers |= {"manual_seed", "fork_rng", "set_rng_state"}
    yield from imports("random", "secrets", "opendp", "numpy.random", "torch.random", "torch.distributions")(tree)
    for node in walk(tree):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if _called(node) in makers or ".random." in f".{name}.":
                yield node.lineno, f"calls {name}"
            elif isinstance(node.func, ast.Attribute) and node.func.attr in draws:
                yield node.lineno, f"calls {node.func.attr}"


def _members(tree: ast.AST) -> Iterator[tuple[int, str]]:
    yield from reads("members")(tree)
    yield from calls("draw_order")(tree)


def _opening(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in walk(tree):
        if isinstance(node, ast.Call) and (
            _called(node) in {"Run", "Ledger"} or _dotted(node.func).endswith("Run.open")
        ):
            yield node.lineno, f"calls {_dotted(node.func)}"


# named after CLIP: these clip nothing
CLIP = {"clip_encoders", "differentiate_clip_loss", "DPClip", "ClipSettings", "ClipPlan"}


def _clipping(tree: ast.AST) -> Iterator[tuple[int, str]]:
    yield from ((line, found) for line, found in defines("clip")(tree) if found.removeprefix("defines ") not in CLIP)


def _unsafe_loading(tree: ast.AST) -> Iterator[tuple[int, str]]:
    yield from imports("pickle", "joblib", "cloudpickle", "dill", "shelve", "marshal")(tree)
    for node in walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.lineno, "passes allow_pickle"
        if isinstance(node, ast.Call) and _called(node) in {"to_pickle", "read_pickle", "exec"}:
            yield node.lineno, f"calls {_called(node)}"
        if isinstance(node, ast.Call) and _called(node) == "eval" and node.args:  # module.eval() of torch has none
            yield node.lineno, "calls eval"
        if isinstance(node, ast.Call) and _dotted(node.func) in {"torch.load", "torch.jit.load"}:
            safe = [k for k in node.keywords if k.arg == "weights_only" and getattr(k.value, "value", None) is True]
            if not safe:
                yield node.lineno, f"calls {_dotted(node.func)} without weights_only=True"


def _guessed(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Attributes that are looked for by name instead of declared by a type."""
    for node in walk(tree):
        looks = isinstance(node, ast.Call) and _dotted(node.func) in {"getattr", "hasattr"} and len(node.args) > 1
        if isinstance(node, ast.Call) and looks and isinstance(node.args[1], ast.Constant):
            yield node.lineno, f"calls {_dotted(node.func)} with {node.args[1].value!r}"


RULES = {
    "random numbers are drawn": Rule(
        _random,
        (
            "privacy/noise.py",
            "privacy/naming.py",  # names of runs
            "data/synthetic.py",
            "data/synthetic_margin.py",
            "cli/demo.py",  # a synthetic population, made with data/synthetic.py
            "cli/demo_tables.py",  # made-up tables to try commands on
            "cli/federated_demo.py",  # the same
            "linear/starts.py",  # public random bases, seeded by their name and size
            "linear/methods/margin_selection.py",  # a public projection, seeded by its size
            "linear/nets.py",  # public candidates, seeded by the page and their number
            "data/partition.py",  # which public images an experiment deals to which client
            "neural/models.py",  # public starting weights, seeded by their name and shape
            "data/regroup.py",  # where to cut a file that is sorted; decides how work is cut up, not its outcome
            "audit/canaries.py",  # secret coins of made-up users
            "audit/fits.py",  # made-up users
            "audit/search.py",  # made-up rows of canaries
        ),
    ),
    "noise sources are made or called": Rule(
        calls(
            "noise", "secure_noise", "SecureNoise", "simulated_noise", "make_gaussian", "make_laplace", "draw_choice"
        ),
        (
            "privacy/noise.py",
            "privacy/release.py",
            "privacy/run.py",  # picks the source, and calls none
            "audit/sabotage.py",  # asks it for less, for the control of an audit of made-up users
            "audit/search.py",  # picks simulated noise, to compare canaries of made-up users
        ),
    ),
    "a run is opened, with its ledger and its noise": Rule(
        _opening,
        (
            "privacy/run.py",
            "privacy/ledger.py",  # one that is read
            "models/learning.py",
            "models/folder.py",  # a ledger that reads what a run has spent so far
            "estimators/margin.py",
            "estimators/network.py",
            "estimators/clip.py",
            "federated/node.py",  # the node's own noise
            "federated/node_accounts.py",  # what a node reserves where the server adds the noise
            "audit/",  # on made-up users
        ),
    ),
    "a noise source is called": Rule(
        calls("noise", "secure_noise", "draw_choice"), ("privacy/release.py", "audit/sabotage.py")
    ),
    "the key of a sample is drawn": Rule(calls("draw_key"), ("privacy/release.py", "audit/sabotage.py")),
    "who is in a sample is found out": Rule(
        _members,
        (
            "users/summing.py",  # of a sample
            "users/batching.py",  # of a group
            "federated/wire/users.py",  # to tell each node of its own users
            "users/isolated.py",  # a node that goes through its users one by one
        ),
    ),
    "samples are made": Rule(
        calls("Sample", "FixedSample", "sample"),
        (
            "privacy/sampling.py",
            "privacy/release.py",
            "cli/demo.py",  # of a synthetic population
            "cli/federated_demo.py",  # the same
        ),
    ),
    "sampled releases are priced": Rule(
        calls("Sampled", "Batched"),
        ("privacy/sampling.py", "privacy/events.py"),  # the latter reads them from a ledger
    ),
    "bounded sums are made": Rule(constructs("BoundedSum"), ("users/", "federated/wire/")),
    "contributions are clipped": Rule(_clipping, ("privacy/bounds.py",)),
    "clipping is asked for": Rule(calls("clip_and_sum"), ("users/", "federated/wire/")),
    "norms and sums of contributions are taken": Rule(
        calls("norms", "roundings", "grid_sum"),
        (
            "privacy/bounds.py",
            "privacy/contributions.py",  # kinds that are made of others ask these
            "linear/references.py",  # labelled not private: it looks for a bound that clips nobody
        ),
    ),
    "the total of a bounded sum is read": Rule(
        reads("total", "exact_numbers"),
        (
            "privacy/release.py",
            "privacy/bounds.py",  # its numbers are made of it
            "federated/wire/answering.py",  # a node sends it to the server that it was told to trust
            "users/isolated.py",  # checks each user's part before it is counted
            "linear/references.py",  # labelled not private
            "audit/worlds.py",  # of made-up users, to compare with what was released
            "audit/releases.py",  # the same, of keys
        ),
    ),
    "users are asked for sums": Rule(
        calls("sums", "count_keys"),
        (
            "privacy/release.py",
            "privacy/run.py",
            "federated/wire/answering.py",  # hands the server's question on to the users of its own
            "users/isolated.py",  # checks each user's part before it is counted
            "linear/references.py",  # labelled not private
            "users/projected.py",  # an engine made of another hands the question on
            "audit/worlds.py",  # made-up users hand the question on to an engine in each of two worlds
            "audit/releases.py",  # made-up users of a selection, in two worlds
        ),
    ),
    "the list of keys that occur is read": Rule(
        reads("private_keys"),
        (
            "privacy/release.py",
            "privacy/selection.py",  # how many there are, for the size of the counts
        ),
    ),
    "releases are posted": Rule(
        calls("post_releases", "post_selection", "post_choice", "post_iterated"), ("privacy/run.py",)
    ),
    "derived pages are posted": Rule(calls("post_derived"), ("privacy/run.py",)),
    "budget is spent": Rule(calls("charge"), ("privacy/release.py", "privacy/node_noise.py")),
    "releases are made": Rule(
        constructs("Release"), ("privacy/release.py", "privacy/node_noise.py", "privacy/billboard.py")
    ),
    "walks are made": Rule(constructs("Iterated"), ("privacy/release.py", "privacy/billboard.py")),
    "choices are made": Rule(
        constructs("Choice"),
        (
            "privacy/release.py",
            "privacy/billboard.py",
            "privacy/run.py",
        ),  # the last compares one with a page that stands
    ),
    "what makes a choice private is computed": Rule(
        calls("compute_scale", "LossBound"),
        (
            "privacy/release.py",
            "privacy/run.py",
            "privacy/exponential.py",
            "federated/wire/messages.py",  # reads the bound that a server sent
        ),
    ),
    "the insides of ledger and billboard are touched": Rule(
        reads("_entries", "_pages", "_capacity"), ("privacy/ledger.py", "privacy/billboard.py")
    ),
    "what sizes memory alone is read": Rule(
        reads("floats_per_user", "floats_per_sparse_user", "workers", "regroup_bytes", "workdir"),
        ("users/",),  # no question and no answer depends on them
    ),
    "files are read that could run code": Rule(_unsafe_loading, ()),
}
EVENTS = Rule(imports("privrep.privacy.accounting"), ())  # events are data: what they cost is not theirs to say
EINSUM = Rule(calls("einsum"), ())  # it rounds the numbers of one user otherwise than those of several
LOCAL = Rule(
    imports(
        "privrep.users",
        "privrep.privacy.release",
        "privrep.privacy.run",
        "privrep.privacy.ledger",
        "privrep.privacy.noise",
        "privrep.privacy.exponential",
    ),
    (),
)
CORE = Rule(imports("privrep.linear", "privrep.estimators", "privrep.models", "privrep.heads", "privrep.cli"), ())
DECLARED = Rule(_guessed, ())  # what a step, a kind of contributions, a bound, noise or users are, their types say
GUESSES = {
    ("cli/node.py", "__metadata__"): "a parameter of a command may be annotated",
    ("data/categories.py", "__iter__"): "callers give lists of many kinds",
    ("data/sources.py", "__iter__"): "the same",
    ("data/table.py", "__array__"): "arrays of NumPy, and series of pandas and polars",
    ("estimators/checks.py", "__iter__"): "callers give lists of many kinds",
    ("estimators/checks.py", "feature_names_in_"): "scikit-learn sets it where columns have names",
    ("estimators/clip.py", "weights_"): "scikit-learn's sign that an estimator was fitted",
    ("estimators/network.py", "learned_"): "the same",
    ("estimators/pipelines.py", "categories"): "scikit-learn's encoders, some of which have declared ones",
    ("multimodal/encoders.py", "config_class"): "classes of transformers: tokenizers have none",
    ("multimodal/encoders.py", "text_config"): "transformers' configurations: some have two inside",
    ("multimodal/encoders.py", "vision_config"): "the same",
    ("neural/checks.py", "__len__"): "callers give lists of many kinds",
    ("neural/checks.py", "tolist"): "arrays of NumPy, and series of pandas and polars",
    ("nn/ghost_clipping.py", "inplace"): "some of torch's layers",
}
"""Attributes that are looked for by name on objects that other libraries or callers made: where, which, and why."""
KERNEL = Rule(
    lambda tree: (
        (line, found)
        for line, found in imports("privrep")(tree)
        if not found.startswith(
            tuple(f"imports privrep.{name}" for name in ("privacy", "typing", "boundary", "errors"))
        )
    ),
    (),
)
WIRE = Rule(imports("privrep.estimators", "privrep.models", "privrep.cli"), ())
USERS_COMPUTE = (
    "local/elementary.py",
    "local/least_squares.py",
    "local/losses.py",
    "local/transform.py",
    "heads/classification.py",
    "heads/label_spaces.py",
    "heads/margin.py",
    "heads/ratings.py",
    "heads/regression.py",
    "linear/class_steps.py",
    "linear/gradient_parts.py",
    "linear/rating_steps.py",
    "linear/steps.py",
)
"""What users compute on their own rows: nothing in these files knows of budgets or engines."""
USERS_COMPUTE_IN = {
    "linear/nets.py": ("Net", "score_candidates"),
    "linear/methods/margin_selection.py": ("find_margin_losses", "_count_depth"),
    "linear/methods/priv_altmin.py": ("_measure_lengths",),
    "linear/methods/private_fedrep.py": ("fit_head_and_gradient",),
}
"""Functions that steps call, where they stand in one file with what the server computes: they know of neither."""


@pytest.mark.parametrize("rule", RULES)
def test_only_where_it_should_be(rule: str) -> None:
    broken = [line for name, path in MODULES.items() for line in RULES[rule].broken_by(name, parse(path))]
    assert not broken, f"{rule} outside {', '.join(RULES[rule].allowed) or 'nowhere'}:\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("places", "rule"),
    [
        (USERS_COMPUTE, LOCAL),
        (USERS_COMPUTE, EINSUM),
        (("privacy/",), CORE),
        (("users/",), CORE),
        (("federated/wire/",), WIRE),
        (("privacy/",), EINSUM),
        (("privacy/",), KERNEL),
        (("privacy/events.py",), EVENTS),
        (("privacy/", "users/", "linear/", "heads/"), DECLARED),
    ],
)
def test_what_users_compute_knows_nothing_of_budgets_and_the_core_nothing_of_algorithms_or_of_einsum(
    places: tuple[str, ...], rule: Rule
) -> None:
    inside = {name: path for name, path in MODULES.items() if name.startswith(places)}
    assert len(inside) >= len(places)
    broken = [line for name, path in inside.items() for line in rule.broken_by(name, parse(path))]
    assert not broken, "\n".join(broken)


def _known_of_budgets(tree: ast.Module, names: tuple[str, ...]) -> list[str]:
    """What these definitions use of the modules that LOCAL forbids, at the top of the file or within."""
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom) and any(LOCAL.find(node))
        for alias in node.names
    }
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found = []
    for name in names:
        uses = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)} & imported
        found += [f"{name} uses {use}" for use in sorted(uses)]
        found += [f"{name}: {what}" for _, what in LOCAL.find(defined[name])]
    return found


def steps_in(tree: ast.Module) -> tuple[str, ...]:
    """Return the names of the classes that are called with a `UserBatch`: steps, wherever they stand."""
    return tuple(
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__call__"
        if any(each.annotation is not None and "UserBatch" in ast.unparse(each.annotation) for each in method.args.args)
    )


COMPUTED_BY_USERS = {
    name: steps_in(parse(path)) + USERS_COMPUTE_IN.get(name, ())
    for name, path in MODULES.items()
    if steps_in(parse(path)) or name in USERS_COMPUTE_IN
}


def test_steps_are_found() -> None:
    found = {name for names in COMPUTED_BY_USERS.values() for name in names}
    assert {"NormalEquations", "RatingPairs", "ModelUpdate", "GradientStep", "BankStep", "HeadLosses"} <= found
    assert len(found) > 35


@pytest.mark.parametrize("name", COMPUTED_BY_USERS)
def test_what_users_compute_beside_a_server_knows_nothing_of_budgets_or_of_einsum(name: str) -> None:
    tree = parse(MODULES[name])
    names = COMPUTED_BY_USERS[name]
    assert not _known_of_budgets(tree, names)
    bodies = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names]
    assert not [found for node in bodies for found in EINSUM.find(node)]


@pytest.mark.parametrize(
    "code",
    [
        "from privrep.privacy.run import Run\nclass Step:\n    def __call__(self, run: Run): ...",
        "class Step:\n    def __call__(self):\n        from privrep.privacy.ledger import Ledger",
    ],
)
def test_a_step_that_knows_of_budgets_is_seen(code: str) -> None:
    assert _known_of_budgets(ast.parse(code), ("Step",))


def guesses(name: str, tree: ast.AST) -> set[tuple[str, str]]:
    return {(name, ast.literal_eval(found.rpartition(" with ")[2])) for _, found in _guessed(tree)}


def test_attributes_are_looked_for_by_name_on_objects_of_other_libraries_alone() -> None:
    found = [guesses(name, parse(path)) for name, path in MODULES.items()]
    assert set().union(*found) == set(GUESSES)


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.allowed])
def test_the_rule_sees_what_it_allows(rule: str) -> None:
    """Otherwise the thing was renamed and the rule guards nothing."""
    found = [line for name, path in MODULES.items() for line in Rule(RULES[rule].find, ()).broken_by(name, parse(path))]
    assert found


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("random numbers are drawn", "import numpy as np\nnp.random.default_rng(0).normal(size=3)"),
        ("random numbers are drawn", "def f(rng):\n    return rng.laplace(size=3)"),
        ("random numbers are drawn", "from numpy.random import default_rng"),
        ("random numbers are drawn", "import secrets"),
        ("random numbers are drawn", "from opendp import measurements"),
        ("random numbers are drawn", "import os\nos.urandom(8)"),
        ("noise sources are made or called", "run.noise('a', 1.0, 3)"),
        ("noise sources are made or called", "run.noise.draw_choice('a', losses, 3)"),
        ("a run is opened, with its ledger and its noise", "with Run.open(users, Budget(9.0, 1e-5)) as run: ..."),
        ("a run is opened, with its ledger and its noise", "Run(users, Ledger(budget), board, noise)"),
        ("a run is opened, with its ledger and its noise", "privacy.run.Run.open(users, budget)"),
        ("a run is opened, with its ledger and its noise", "kernel.Ledger(budget)"),
        ("a noise source is called", "secure_noise.draw_choice('a', losses, 3)"),
        ("random numbers are drawn", "rng.choice(5)"),
        ("random numbers are drawn", "def f(rng, shape):\n    return rng.gumbel(size=shape)"),
        ("random numbers are drawn", "import torch\ntorch.randn(3)"),
        ("random numbers are drawn", "torch.manual_seed(0)"),
        ("random numbers are drawn", "torch.bernoulli(p)"),
        ("random numbers are drawn", "nn.functional.dropout(x, 0.5)"),
        ("random numbers are drawn", "layer.weight.normal_()"),
        ("random numbers are drawn", "from torch.distributions import Normal"),
        ("the key of a sample is drawn", "run.noise.draw_key('page')"),
        ("who is in a sample is found out", "sample.members(100)"),
        ("who is in a sample is found out", "sample.draw_order(100)"),
        ("samples are made", "Poisson(0.1).sample(b'')"),
        ("samples are made", "FixedSample(3, b'')"),
        ("sampled releases are priced", "Sampled(1.0, 0.01, relation)"),
        ("sampled releases are priced", "Batched(1.0, 0.01, relation, 100)"),
        ("walks are made", "Iterated(3, state, {})"),
        ("choices are made", "Choice(0, 3, 1.0, 1.0)"),
        ("what makes a choice private is computed", "compute_scale(bound, 1.0, relation)"),
        ("releases are posted", "run.billboard.post_choice('a', choice)"),
        ("releases are posted", "run.billboard.post_iterated('a', walk)"),
        ("bounded sums are made", "from privrep.privacy.bounds import BoundedSum\nBoundedSum(x, bound)"),
        ("bounded sums are made", "bounds.BoundedSum(x, bound)"),
        ("contributions are clipped", "def _clip_rows(x): ..."),
        ("clipping is asked for", "clip_and_sum(c, bound)"),
        ("norms and sums of contributions are taken", "c.norms()"),
        ("norms and sums of contributions are taken", "c.roundings(1.0, step)"),
        ("norms and sums of contributions are taken", "c.grid_sum(w, step)"),
        ("the total of a bounded sum is read", "print(sums['a'].total)"),
        ("users are asked for sums", "run.users.sums(step, bounds)"),
        ("users are asked for sums", "holders.count_keys(bound)"),
        ("the list of keys that occur is read", "print(len(holders.private_keys))"),
        ("releases are posted", "run.billboard.post_releases('a', {})"),
        ("releases are posted", "run.billboard.post_selection('a', selected)"),
        ("budget is spent", "ledger.charge({})"),
        ("releases are made", "Release(total, 0.0, 1.0, 1.0)"),
        ("the insides of ledger and billboard are touched", "ledger._entries.clear()"),
        ("what sizes memory alone is read", "Bound(1.0, step.spec.floats_per_user)"),
        ("what sizes memory alone is read", "Bound(1.0 / users.performance.workers, 3)"),
        ("files are read that could run code", "import pickle"),
        ("files are read that could run code", "eval(text)"),
        ("files are read that could run code", "torch.load(path)"),
        ("files are read that could run code", "torch.load(path, weights_only=False)"),
        ("files are read that could run code", "np.load(f, allow_pickle=True)"),
        ("files are read that could run code", "from joblib import load"),
    ],
)
def test_the_rule_sees_what_it_forbids(rule: str, code: str) -> None:
    assert RULES[rule].broken_by("elsewhere.py", ast.parse(code))


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (DECLARED, "slots = getattr(step, 'slots', None)"),
        (DECLARED, "if hasattr(users, 'noisy_sums'): ..."),
        (EVENTS, "from privrep.privacy.accounting import total_mu"),
        (KERNEL, "from privrep.users.summing import map_blocks"),
        (KERNEL, "from privrep.data.sparse import SparseRows"),
        (LOCAL, "from privrep.privacy.run import Run"),
        (CORE, "import privrep.linear.steps"),
        (EINSUM, "np.einsum('ij->i', x)"),
    ],
)
def test_rules_of_packages_see_what_they_forbid(rule: Rule, code: str) -> None:
    assert rule.broken_by("elsewhere.py", ast.parse(code))
    assert not rule.broken_by("elsewhere.py", ast.parse("from privrep.errors import InputError\ngetattr(x, name)"))


def test_a_guess_is_seen_wherever_it_is() -> None:
    for code in ("getattr(step, 'slots', None)", "hasattr(event, 'count')", "getattr(users, 'noisy_sums')"):
        assert guesses("estimators/base.py", ast.parse(code)) - set(GUESSES)


# Strings that name classes import them, too

NAMED = re.compile(r"privrep(?:\.[a-z_]\w*)+(?::\w+)?")


def layers() -> list[list[str]]:
    """Return the packages of each layer, from the top, as `make lint` checks them."""
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return [line.split(" : ") for line in contracts[0]["layers"]]


def named_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, string) for every string that is nothing but the name of a module, or of something in one."""
    for node in walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            yield node.lineno, node.value


def upwards(name: str, tree: ast.AST) -> list[str]:
    """Return the strings of a file that name something in a layer above its own."""
    height = {package: number for number, line in enumerate(layers()) for package in line}
    own = height[name.partition("/")[0].removesuffix(".py")]
    return [
        f"{name}:{line}: {named}" for line, named in named_in(tree) if height[re.split("[.:]", named)[1]] < own
    ]  # a smaller number is a higher layer


NAMING = {name: path for name, path in MODULES.items() if any(named_in(parse(path)))}


def test_strings_that_name_classes_are_found() -> None:
    assert {"__init__.py", "federated/wire/travelling.py"} <= set(NAMING)


@pytest.mark.parametrize("name", NAMING)
def test_strings_that_name_classes_name_what_is_there(name: str) -> None:
    pytest.importorskip("torch")
    for _, named in named_in(parse(NAMING[name])):
        module, _, attribute = named.partition(":")
        assert not attribute or isinstance(vars(importlib.import_module(module))[attribute], type)
        importlib.import_module(module)


@pytest.mark.parametrize("name", [name for name in NAMING if name != "__init__.py"])
def test_strings_that_name_classes_keep_to_the_layers(name: str) -> None:
    assert not upwards(name, parse(NAMING[name]))


def test_the_layers_are_seen_in_strings() -> None:
    assert upwards("privacy/noise.py", ast.parse("STEPS = ('privrep.linear.steps:PairMoments',)"))
    assert not upwards("federated/node.py", ast.parse("STEPS = ('privrep.linear.steps:PairMoments',)"))
