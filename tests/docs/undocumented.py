from dataclasses import dataclass


@dataclass
class Section:
    key: int = 0
