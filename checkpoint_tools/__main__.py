"""Entry point of `python -m checkpoint_tools`."""

from checkpoint_tools.cli import main

if __name__ == "__main__":
    main()
