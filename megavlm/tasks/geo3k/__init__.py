"""Mathematics with images, as in Geometry3K: an answer that math-verify compares."""
