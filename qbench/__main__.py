"""``python -m qbench`` is the `qbench` command."""

from qbench.cli import main

if __name__ == "__main__":
    main()
