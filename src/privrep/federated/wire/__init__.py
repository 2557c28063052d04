"""Users on other machines, reached through Flower: local steps travel as data, clipped sums come back."""
