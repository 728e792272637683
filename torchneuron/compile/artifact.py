"""Plans among the artifacts of `torch.compiler.save_cache_artifacts()`; loaded with `import torch`, hence small."""

from __future__ import annotations

from torch.compiler._cache import CacheArtifact


class PlanArtifact(CacheArtifact):
    """An entry of the compile cache: `key` is its name, `content` its bytes."""

    @staticmethod
    def type() -> str:
        return "neuron"

    def populate_cache(self) -> None:
        from torchneuron.compile import cache

        try:
            cache.decode(self.content)
        except Exception as error:
            cache.log.warning("An artifact of the compile cache is not used: %s", error)
            return
        if self.key.isalnum():  # a name, not a path
            cache.write(self.key, self.content)
