"""Run `python -m backhaul`."""

from backhaul.cli import main

if __name__ == "__main__":
    main()
