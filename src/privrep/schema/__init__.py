"""The configurations of every command: one pydantic model each, one reader, one way to say what is wrong.

`machinery` reads a file and makes one sentence of every mistake. `sections` holds what several commands share.
`commands` holds the configurations of `fit`, `fit-neural` and `federate`, `clip` that of `fit-clip`. `template` prints
them as JSON Schema and as a commented TOML file. `sent` reads JSON that came from another machine. Nothing here needs
NumPy or PyTorch: a mistake is found before anything heavy is loaded.
"""
