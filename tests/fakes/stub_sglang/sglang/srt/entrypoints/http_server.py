"""Nothing: what takes SGLang seconds to import."""
