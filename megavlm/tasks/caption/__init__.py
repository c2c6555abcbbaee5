"""Descriptions of images, compared with reference captions."""
