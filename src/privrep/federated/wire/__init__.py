"""The federation's connection: local steps travel as data through Flower, clipped sums come back."""
