"""Recovery policies: each proposes plans for a situation; ``table`` says which there are."""
