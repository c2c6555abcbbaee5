from left_out import stand_ins

__getattr__ = stand_ins(__name__)
