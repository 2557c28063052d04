"""What commands refuse: cases as data. `test_refusals` holds all of them to the same contract.

A case says where the command runs (a folder of files that `worlds` makes), what is typed there, and words of the one
sentence that must come of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Changes = dict[str, Any]
BUDGET_OPTIONS = ["--epsilon", "4", "--delta", "1e-6"]
COLUMNS = ["--user", "user", "--target", "y"]
FEATURES = ["--features", "x0,x1,x2"]
INSECURE = ["--out", "out", "--insecure"]


@dataclass(frozen=True)
class Case:
    """A command that is refused."""

    world: str  # the folder it runs in
    arguments: list[str]
    sentence: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the world's configuration, c.toml
    text: tuple[str, str] | None = None  # of its configuration: what is replaced by what
    remarks: bool = False  # whether something is said before

    def __str__(self) -> str:
        return f"{self.arguments[0]}: {self.sentence[:60]}"


# Options of `fit` on a table; by name, what is added to a command that works

FIT: dict[str, tuple[list[str], str]] = {
    "epsilon": (["--epsilon", "0"], "epsilon"),
    "delta": (["--delta", "1.5"], "delta"),
    "rank": (["--rank", "two"], "--rank"),
    "rank too large": (["--rank", "7"], "rank"),
    "relation": (["--relation", "swap"], "--relation"),
    "seed": (["--simulate", "-1"], "--simulate"),
    "user column": (["--user", "usr"], "'usr'"),
    "target column": (["--target", "z"], "'z'"),
    "feature column": (["--features", "x0,x9"], "'x9'"),
    "target among features": (["--features", "x0,y"], "'y'"),
    "scale file": (["--scale", "nowhere.json"], "nowhere.json"),
    "covariance file": (["--covariance", "nowhere.json"], "nowhere.json"),
    "start": (["--start", "middle"], "start"),
    "random start without a rank": (["--start", "random"], "rank"),
    "paper with a start": (["--paper", "--rank", "2", "--no-intercept", "--start", "random"], "start"),
    "paper with several targets": (["--paper", "--rank", "2", "--no-intercept", "--target", "y,x0"], "--target"),
    "several targets, one unknown": (["--target", "y,z"], "'z'"),
    "a target twice": (["--target", "y,y"], "'y'"),
    "no target": (["--target", ","], "target"),
    "categorical column": (["--categorical", "colour"], "--categorical"),
    "categorical column twice": (["--categorical", "x0,x0"], "more than once"),
    "categorical target": (["--categorical", "y"], "'y'"),
    "categorical feature": (["--categorical", "x0", "--features", "x0,x1"], "'x0'"),
    "categories file": (["--categorical", "x0", "--categories", "nowhere.json"], "nowhere.json"),
    "items without item": (["--items", "nowhere.json"], "--item"),
    "item column": (["--item", "jok"], "--item: there is no column 'jok'"),
    "item is the user": (["--item", "user"], "'user'"),
    "item and features": (["--item", "x0", "--features", "x1"], "leave out --features"),
    "item and much else": (
        ["--item", "x0", "--method", "centaur", "--paper", "--no-intercept"],
        "--method, --paper, --no",
    ),
    "item and several targets": (["--item", "x0", "--target", "y,x1"], "one target"),
    "covariance and categorical": (["--categorical", "x0", "--covariance", "nowhere.json"], "--categorical"),
    "scale and values to select": (["--categorical", "x0", "--scale", "nowhere.json"], "--categories"),
    "values to select, nowhere to sort": (["--categorical", "x0", "--workdir", "nowhere"], "nowhere"),
    "workdir": (["--workdir", "nowhere"], "nowhere"),
    "task": (["--task", "ranking"], "--task must be one of"),
    "classes of numbers": (["--classes", "a,b"], "--classes goes with --task classification"),
    "loss and classes of numbers": (["--loss", "log", "--classes", "a,b"], "--classes and --loss go with --task"),
    "loss": (["--task", "classification", "--loss", "square"], "loss must be one of log, hinge"),
    "classes of several targets": (["--task", "classification", "--target", "y,x0"], "one target column"),
    "class labels, no such column": (["--task", "classification", "--target", "z"], "'z'"),
    "classes file": (["--task", "classification", "--classes", "nowhere.json"], "nowhere.json"),
    "one class": (["--task", "classification", "--classes", "a"], "--classes: classes must be a list of 2"),
    "a class twice": (["--task", "classification", "--classes", "a,b,a"], "--classes: classes lists 'a' more"),
    "an empty class": (["--task", "classification", "--classes", "a,,b"], "--classes: classes must be"),
    "classes and priv-altmin": (["--task", "classification", "--method", "priv-altmin"], "private-fedrep or centaur"),
    "classes and paper": (["--task", "classification", "--paper"], "for labels use the default"),
    "classes of ratings": (["--item", "x0", "--task", "classification"], "leave out --task"),
    "classes to select, rank too large": (["--task", "classification", "--rank", "7"], "rank"),
    "classes to select, nowhere to sort": (["--task", "classification", "--workdir", "nowhere"], "nowhere"),
    "method": (["--method", "fast"], "method"),
    "fedavg and classes": (["--method", "fedavg", "--task", "classification"], "private-fedrep or centaur"),
    "fedavg and several targets": (["--method", "fedavg", "--target", "y,x0"], "fedavg takes one target"),
    "fedavg and a start": (["--method", "fedavg", "--start", "spectral"], "fedavg has no start"),
    "fedavg, number of users not public": (
        ["--method", "fedavg", "--relation", "add-or-remove-one-user"],
        "use replace-one-user",
    ),
    "paper without a rank": (["--paper", "--no-intercept"], "rank"),
    "paper with intercepts": (["--paper", "--rank", "2"], "intercepts"),
    "paper, number of users not public": (
        ["--paper", "--rank", "2", "--no-intercept", "--relation", "add-or-remove-one-user"],
        "replace-one-user",
    ),
}

BUDGET: list[tuple[list[str], str]] = [
    ([], "--epsilon"),
    (["--epsilon", "1", "--rate", "0.2"], "--features"),
    (["--noise", "1", "--rate", "0.2"], "--epsilon"),
    (["--epsilon", "1", "--items", "9", "--rows", "5", "--users", "99", "--rate", "0.2"], "--rate"),
    (["--epsilon", "1", "--items", "9", "--rows", "5", "--users", "99", "--gain", "0.2"], "--gain"),
    (["--epsilon", "1", "--items", "9", "--rows", "5", "--users", "99", "--slopes", "0.5"], "--slopes"),
    (["--epsilon", "1", "--features", "5", "--rank", "0", "--rows", "9", "--rate", "0.7"], "rate"),
    (
        ["--epsilon", "1", "--features", "5", "--rank", "0", "--rows", "9", "--rate", "0.2", "--noise-level", "2"],
        "--noise-level",
    ),
    (["--epsilon", "1", "--noise", "2"], "--noise"),
    (["--epsilon", "-1"], "epsilon"),
    (["--noise", "0"], "noise_multiplier"),
    (["--noise", "2", "--releases", "0"], "releases"),
    (["--noise", "2", "--rank", "2"], "--rank"),
    (["--epsilon", "1", "--releases", "2"], "--releases"),
    (["--epsilon", "1", "--features", "5", "--rank", "2"], "--rows"),
    (["--epsilon", "1", "--features", "5", "--rank", "6", "--rows", "9"], "rank"),
    (["--epsilon", "1", "--features", "5", "--rank", "2", "--rows", "9", "--levels", "-1"], "levels"),
    (["--epsilon", "1", "--features", "5", "--rank", "2", "--rows", "9", "--users", "0"], "--users"),
    (["--epsilon", "1", "--features", "5", "--rank", "2", "--rows", "9", "--gain", "2"], "--gain"),
    (["--epsilon", "1", "--relation", "none"], "--relation"),
]

PAIRS: list[tuple[Changes, str]] = [
    ({"data": {"unit": None}}, "the config must say data.unit, text."),
    ({"data": {"unit": "row"}}, "data.unit must be one of pair, user. Got 'row' instead."),
    ({"data": {"knd": "npz"}}, "the config has no key data.knd; did you mean kind?"),
    ({"date": {}}, "the config has no section date; did you mean data?"),
    ({"training": {"steps": 2.5}}, "training.steps must be a whole number. Got 2.5 instead."),
    ({"training": {"mechanism": "btach"}}, "training.mechanism must be one of bank, batch, inside."),
    ({"training": {"clip": -1.0}}, "clip and rate are positive"),
    ({"data": {"path": "none.npz"}}, "there is no file"),
    ({"data": {"bank": None}}, "the images have labels: name data.classes"),
    ({"data": {"bank": "texts.csv"}}, "data.bank is a .txt file of public captions"),
    ({"data": {"classes": ["a"]}}, "either prompts of data.classes or those of data.bank"),
    ({"data": {"unit": "user"}}, "the config must say data.pairs_per_user"),
    ({"data": {"pairs_per_user": 2}}, 'data.pairs_per_user goes with data.unit = "user"'),
    ({"data": {"kind": "idx"}}, 'data of kind "idx" needs data.images (a path) and data.labels (a path).'),
    ({"data": {"kind": "cifar"}}, 'data.test of kind "cifar" says part'),
    ({"data": {"kind": "npz"}}, 'goes with data.kind = "features"'),
    ({"data": {"kind": "npz", "bank": None}}, "the config must say data.classes"),
    ({"data": {"kind": "flickr8k", "test": None}}, "so a pair is no unit"),
    ({"data": {"colour": True}}, 'data of kind "features" has no data.colour'),
    ({"data": {"templates": ["a {}"]}}, "name the classes"),
    ({"data": {"test": {"held_out": 3}}}, 'data.test of kind "features" says path'),
    ({"encoders": {"image": "efficientnet"}}, "features are encoded images"),
    ({"encoders": {"text": "bert"}}, 'encoders.text is "minilm"'),
    ({"encoders": {"train": "half"}}, "encoders.train must be one of"),
    (
        {"training": {"mechanism": "inside"}, "encoders": {"learn": "image"}},
        'mechanism "inside" trains two projections',
    ),
    ({"privacy": {"epsilon": None}}, "the config must say privacy.epsilon"),
    ({"privacy": {"delta": 0.5}}, "delta must be at most 0.01"),
    ({"output": None}, "say where the model goes"),
]

IMAGES: list[tuple[Changes, str]] = [
    ({"privcy": {"epsilon": 1}}, "no section privcy; did you mean privacy?"),
    ({"privacy": {"epsilonn": 1}}, "no key privacy.epsilonn; did you mean epsilon?"),
    ({"model": {"zzz": 1}}, "no key model.zzz; there are share, network"),
    ({"users": {"partition": {"client": 3}}}, "users.partition.client; did you mean clients?"),
    ({"privacy": {"epsilon": None}}, "must say privacy.epsilon"),
    ({"privacy": {"epsilon": "one"}}, "privacy.epsilon must be a number"),
    ({"privacy": {"epsilon": -1.0}}, "epsilon must be a positive"),
    ({"privacy": {"delta": 0.0}}, "delta must be above 0"),
    ({"privacy": {"seed": True}}, "privacy.seed must be a whole number"),
    ({"data": {"kind": "mnist"}}, "data.kind must be one of idx, cifar"),
    ({"data": {"images": None}}, 'kind "idx" needs data.images'),
    ({"data": {"path": "x"}}, 'kind "idx" has no data.path'),
    ({"data": {"images": "nowhere"}}, "there is no file"),
    ({"data": {"images": "labels", "labels": "images.gz"}}, "swapped"),
    ({"users": {"partition": None}}, "say who the users are"),
    ({"users": {"by": "column"}}, "say who the users are"),
    ({"users": {"partition": None, "by": "writers"}}, "use users.partition"),
    ({"users": {"partition": {"clients": 9, "classes_per_client": 0}}}, "classes_per_client"),
    ({"users": {"validation": 0.1}}, "leave the other out"),
    ({"model": {"classes": None}}, "must say model.classes"),
    ({"model": {"classes": 2}}, "list of class numbers"),
    ({"model": {"classes": []}}, "whole number or a list of names"),
    ({"model": {"share": "most"}}, "model.share must be one of"),
    ({"model": {"share": "all"}}, "needs a representation"),
    ({"model": {"network": "vgg"}}, "model.network must be one of mlp, lenet"),
    ({"model": {"network": "lenet", "share": "all"}}, "too small"),
    ({"model": {"keep": 9}}, "goes with model.features"),
    ({"model": {"features": "dct", "keep": 99}}, "keep must lie between 1 and 64"),
    ({"model": {"rows": 0}}, "rows must be a whole number, 1 or more"),
    ({"training": {"rate": 1.5}}, "rate"),
    ({"training": {"clip": 0.0}}, "clip"),
    ({"training": {"epochs": 0}}, "at least 1"),
    ({"training": {"server": "rmsprop"}}, "training.server must be one of sgd"),
    ({"data": 3}, "data must be a table"),
]

GAPS: list[tuple[list[str], str]] = [
    (["--missing", "refuse"], "misses values of x1 ("),
    (["--missing", "mean"], "--missing must be one of impute, drop, refuse"),
    (["--missing-indicator", "w"], "--missing-indicator: 'w' is no feature of numbers"),
    (["--missing-indicator", "x1", "--missing-indicator", "x1"], "more than once"),
    (["--weight", "x0"], "which is the column of weights"),
    (["--weight", "away"], "there is no column 'away'"),
    (["--weight", "y"], "which is the target column"),
]

NETWORKS: list[tuple[list[str], str]] = [
    (["d.npz", "--interval", "0.9"], "--interval is for numbers"),
    (["d.npz", "--item", "joke"], "--item is for ratings"),
    (["d.npz", "--features", "x0"], "--features is for tables of flattened rows"),
    (["d.npz", "--user", "who"], "--user is for tables"),
    (["flat.csv"], "pass --user"),
    (["flat.csv", "--user", "nobody"], "'nobody'"),
    (["new.csv", "--user", "who"], "rows of 64 numbers; "),
    (["images.parquet", "--image", "png"], "pass --user"),
    (["images.parquet", "--image", "is", "--user", "u"], "write encoded images"),
    (["small.npz"], "has images of (4, 4, 1), and the model takes (8, 8, 1)"),
    (["narrow.npz"], "rows of 5 numbers, and the model takes rows of 64"),
    (["bad.npz"], "row 2 of"),
    (["texts.npz"], "are text, those of"),
    (["users.npz"], "one user, and for heads one target, for each of its 3 rows"),
    (["empty.npz"], "has no rows"),
    (["none.npz"], "has no array 'X'"),
    (["nobody.npz"], "has no array 'users'"),
    (["missing.npz"], "there is no file"),
    (["rows.txt"], "is no file that rows are read from"),
    (["bad.toml"], "must say data.kind"),
    (["flat.csv", "--user", "who", "--out", "p.txt"], "must end in"),
]

SHARED_TABLE: list[tuple[str, str, str]] = [
    ("[privacy]", "[privcy]", "no section privcy; did you mean privacy"),
    ("epsilon = 4", "", "must say privacy.epsilon"),
    ("epsilon = 4", "epsilon = 0", "epsilon"),
    ("epsilon = 4", 'epsilon = "4"', "privacy.epsilon must be a number"),
    ("delta = 1e-6", 'delta = 1e-6\nrelation = "x"', "privacy.relation must be one of"),
    ("delta = 1e-6", "delta = 1e-6\nseed = -1", "privacy.seed"),
    ('kind = "table"', "", 'model.kind, "table" or "neural"'),
    ('kind = "table"', 'kind = "images"', 'model.kind, "table" or "neural"'),
    ('kind = "table"', "kind = []", 'model.kind, "table" or "neural"'),
    ('user = "user"', "", "must say model.user"),
    ('user = "user"', 'usr = "user"\nuser = "user"', "no key model.usr; did you mean user"),
    ('user = "user"', 'user = "user"\nimage = [8, 8, 1]', "no key model.image"),
    ('user = "user"', "user = 3", "model.user must be text"),
    ('user = "user"', 'user = "x0"', "'x0' more than once"),
    ('target = "y"', "target = 3", "model.target must be the name of a column"),
    ('target = "y"', "target = []", "model.target must be the name of a column"),
    ('target = "y"', 'target = "y"\nrank = 4', "rank must lie between 0 and the number of features, 3"),
    ('target = "y"', 'target = "y"\nmethod = "fast"', "method must be one of"),
    ('target = "y"', 'target = "y"\ntask = "ranking"', "model.task must be one of"),
    ('target = "y"', 'target = "y"\nclasses = ["a", "b"]', "model.classes goes with"),
    ('target = "y"', 'target = "y"\nloss = "log"', "model.loss goes with"),
    ('target = "y"', 'target = "y"\ntask = "classification"', "must list model.classes"),
    ('target = "y"', 'target = "y"\ntask = "classification"\nclasses = ["a"]', "model.classes must be a list of 2"),
    ('target = "y"', 'target = "y"\ntask = "classification"\nclasses = [1, "a"]', "model.classes must be all"),
    ('target = "y"', 'target = "y"\nscale = {x0 = 1}', "no positive number for feature 'x1'"),
    ('target = "y"', 'target = "y"\nscale = {x0 = 1, x1 = 1, x2 = 1, x3 = 1}', "'x3', which is no feature"),
    ('target = "y"', 'target = "y"\ncategories = {colour = "red"}', "model.categories.colour must be the list"),
    ('target = "y"', 'target = "y"\ncategories = {colour = []}', "model.categories lists none"),
    ('features = ["x0", "x1", "x2"]', "", "must name its columns"),
    ('features = ["x0", "x1", "x2"]', 'features = "x0"', "model.features must be a list of texts"),
    ("[privacy]", "[training]\nrounds = 3\n[privacy]", "[training] is for"),
    ("[privacy]", "[federation]\nmin_users = 0\n[privacy]", "federation: min_users must be"),
    ("[privacy]", "[federation]\nwait = -1\n[privacy]", "federation: wait must be"),
    ("[privacy]", '[federation]\nnoise = "nobody"\n[privacy]', "federation.noise must be one of"),
    ("[privacy]", "[federation]\nnodes = 3\n[privacy]", "no key federation.nodes"),
    ("[privacy]", "[server]\nport = 70000\n[privacy]", "server.port must lie"),
    ("[privacy]", "[server\n[privacy]", "is not a TOML file"),
]

SHARED_NETWORK: list[tuple[str, str, str]] = [
    ("classes = 3", "", "must say model.classes"),
    ("classes = 3", 'classes = 3\nnetwork = "resnet"', "model.network must be one of"),
    ("classes = 3", "classes = 3\nrank = 2", 'kind "neural" has no key model.rank'),
    ("classes = 3", "classes = 3\nkeep = 5", "model.keep goes with"),
    ("classes = 3", 'classes = 3\nfeatures = "pixels"', "model.features must be one of"),
    ("image = [8, 8, 1]", "image = [8, 8]", "model.image must be"),
    ("image = [8, 8, 1]", 'features = "edges"', "is of images"),
    ("image = [8, 8, 1]", "", "how many numbers a row has"),
    ("image = [8, 8, 1]", 'columns = {user = "u"}', "must say model.columns.target"),
    ("delta = 1e-5", 'delta = 1e-5\nrelation = "add-or-remove-one-user"', "replace-one-user"),
    ("[model]", "[training]\nclips = 3\n[model]", "no key training.clips; did you mean clip"),
]

# All other commands

JOIN = ["federate", "join", "localhost:9092", "--data", "rows.parquet", "--folder", "n"]
PREDICT = ["predict", "model", "users.csv", "--out", "p.csv"]
OTHERS: list[tuple[str, list[str], str]] = [
    ("tables", ["fit", "users.csv", *COLUMNS, "--out", "m", "--delta", "1e-6"], "a fit needs --epsilon; or a file"),
    ("tables", ["fit", "users.csv", "--user", "user"], "a fit needs --target, --epsilon and --delta; or a file"),
    ("tables", ["fit", "users.csv", *COLUMNS, *BUDGET_OPTIONS], "say where the model goes"),
    ("tables", ["fit", "users.csv", *COLUMNS, *BUDGET_OPTIONS, "--out", "new.csv"], "is a file; name a folder"),
    ("tables", ["fit", "users.csv", *COLUMNS, *BUDGET_OPTIONS, "--out", "."], "holds no run of privrep"),
    ("model", ["fit", "users.csv", *COLUMNS, *BUDGET_OPTIONS, "--out", "model"], "pass --overwrite"),
    ("tables", ["fit", "nothing.csv", *COLUMNS, *BUDGET_OPTIONS, "--out", "m"], "nothing.csv"),
    ("model", [*PREDICT, "--interval", "0"], "--interval must lie between 0 and 1"),
    ("model", [*PREDICT, "--interval", "1"], "--interval must lie between 0 and 1"),
    ("model", [*PREDICT, "--interval", "1.5"], "--interval must lie between 0 and 1"),
    ("model", [*PREDICT, "--interval=-0.5"], "--interval must lie between 0 and 1"),
    ("model", [*PREDICT, "--interval", "nan"], "--interval must lie between 0 and 1"),
    ("model", [*PREDICT, "--unknown", "guess"], "--unknown must be one of prior, skip, refuse"),
    ("model", [*PREDICT, "--unknown", "skip", "--refuse-unknown"], "leave one out"),
    ("model", [*PREDICT, "--image", "png"], "--image is for networks; leave it out"),
    ("model", [*PREDICT, "--proba"], "--proba is for networks; leave it out"),
    ("model", [*PREDICT, "--item", "joke"], "no model of ratings"),
    ("model", ["predict", "model", "new.csv", "--out", "p.csv", "--refuse-unknown"], "in row 1 of new.csv has no head"),
    ("model", ["predict", "model", "users.csv", "--out", "p.txt"], "must end in"),
    ("model", ["predict", "model", "users.csv", "--out", "nowhere/p.csv"], "there is no folder nowhere"),
    ("model", ["predict", "model", "users.csv", "--out", "new.csv"], "exists already; choose another name"),
    ("model", ["predict", "model", "users.csv", "--out", "model/p.csv"], "may be published"),
    ("model", ["predict", "model", "nothing.csv", "--out", "p.csv"], "nothing.csv"),
    ("model", ["predict", ".", "users.csv", "--out", "p.csv"], "model folder"),
    ("model", ["predict", "model", "users.csv", "--out", "-", "--json"], "would both write to standard output"),
    ("model", ["personalize", "model", "new.csv", "--out", "heads.txt"], "heads.txt must end in"),
    ("model", ["personalize", "model", "new.csv", "--out", "h.json", "--replace"], "with --out use --overwrite"),
    ("model", ["personalize", "model", "new.csv", "--user-id", "9000"], "leave --user-id out"),
    ("model", ["personalize", "model", "new.csv", "--target", "y,x0"], "has one target and --target names 2"),
    ("model", ["personalize", "model", "users.csv"], "has a head in model already"),
    ("model", ["inspect", "nowhere"], "nowhere"),
    ("model", ["inspect", "model/private"], "model"),
    ("model", ["node", "predict", "model", "users.csv", "--out", "p.csv"], "holds no model of a federation yet"),
    ("model", ["node", "personalize", "model", "users.csv"], "holds no model of a federation yet"),
    ("tables", ["config", "template", "fit-neurl"], "no configuration is called fit-neurl; did you mean fit-neural?"),
    ("tables", ["config", "schema", "zzz"], "there are fit, fit-neural"),
    ("tables", ["config", "template", "fit", "--out", "new.csv"], "exists already"),
    ("tables", ["demo", "--out", "."], "exists already"),
    ("tables", ["demo", "--out", ".", "--overwrite"], "holds more than a demo"),
    ("images", ["fit-neural", "none.toml"], "there is no file"),
    ("images", ["fit-neural", "broken.toml"], "is not a TOML file"),
    ("images", ["fit-neural", "c.toml"], "say where the model goes"),
    ("pairs", ["fit-clip", "none.toml"], "there is no file"),
    ("federation", ["federate", "serve", "c.toml"], "say where the model goes"),
    ("federation", ["federate", "serve", "c.toml", "--out", "out"], "--keys KEYS"),
    ("federation", ["federate", "serve", "c.toml", "--out", "out", "--keys", "none"], "there is no file"),
    ("federation", JOIN, "--key node.key --ca ca.pem"),
    ("federation", [*JOIN, "--key", "node.key"], "--key node.key --ca ca.pem"),
    ("federation", [*JOIN, "--key", "node.key", "--ca", "ca.pem"], "there is no file"),
    ("federation", [*JOIN, "--key", "node.key", "--insecure"], "leave it, or --key and --ca, out"),
    ("federation", ["federate", "simulate", "c.toml", "--data", "none.csv", "--out", "out"], "there is no file none"),
    ("federation", ["federate", "demo", "--out", "."], "holds no demo"),
]
ADDRESSES = ["localhost", ":9092", "localhost:", "localhost:0", "host:99999", "http://host:80"]


def all_cases() -> Iterator[Case]:
    """Yield the cases of all commands."""
    fit = ["fit", "users.csv", *COLUMNS, *BUDGET_OPTIONS, "--out", "m"]
    yield from (Case("tables", [*fit, *options], sentence) for options, sentence in FIT.values())
    fit = ["fit", "rows.csv", *COLUMNS, *BUDGET_OPTIONS, *FEATURES, "--out", "m"]
    yield from (Case("gaps", [*fit, *options], sentence) for options, sentence in GAPS)
    yield from (Case("tables", ["budget", "--delta", "1e-6", *options], sentence) for options, sentence in BUDGET)
    yield from (Case("pairs", ["fit-clip", "c.toml"], sentence, changes) for changes, sentence in PAIRS)
    neural = ["fit-neural", "c.toml", "--out", "m"]
    yield from (Case("images", neural, sentence, changes) for changes, sentence in IMAGES)
    for options, sentence in NETWORKS:
        out = [] if "--out" in options else ["--out", "p.csv"]
        yield Case("networks", ["predict", "m", *options, *out], sentence)
    serve = ["federate", "serve", "c.toml", *INSECURE]
    for world, texts in (("federation", SHARED_TABLE), ("federated network", SHARED_NETWORK)):
        yield from (Case(world, serve, sentence, text=(old, new), remarks=True) for old, new, sentence in texts)
    yield from (Case(world, arguments, sentence) for world, arguments, sentence in OTHERS)
    for address in ADDRESSES:
        yield Case("federation", ["federate", "join", address, *JOIN[3:], "--insecure"], "is HOST:PORT")
    for host in ("0.0.0.0", "192.0.2.7", "fed.example.org"):
        words = "--insecure is for loopback alone"
        yield Case("federation", ["federate", "join", f"{host}:9", *JOIN[3:], "--insecure"], words)
        yield Case("federation", serve, words, text=("[privacy]", f"[server]\nhost = '{host}'\n[privacy]"))
