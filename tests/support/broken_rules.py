"""Wrong versions of `Sampler.accept_or_resample`, which tests of the distribution must notice."""

from domino_spec.decoding.sampling import Sampler

_RIGHT = Sampler.accept_or_resample


def always_accept(self, p, q, draft, position, start):
    if draft is None:
        return self.draw(p, position, start), False
    return draft, True


def resample_from_p(self, p, q, draft, position, start):
    if draft is not None and self.uniform(position, start) * float(q[draft]) < float(p[draft]):
        return draft, True
    return self.draw(p, position, start), False


def accept_by_p_alone(self, p, q, draft, position, start):
    if draft is None:
        return self.draw(p, position, start), False
    if self.uniform(position, start) < float(p[draft]):
        return draft, True
    return self.draw((p - q).clamp(min=0) + 1e-9, position, start), False


def accept_too_easily(self, p, q, draft, position, start):
    """Biased: twice the chance it should have."""
    if draft is None:
        return self.draw(p, position, start), False
    if self.uniform(position, start) * float(q[draft]) < 2 * float(p[draft]):
        return draft, True
    return self.draw((p - q).clamp(min=0) + 1e-9, position, start), False


def accept_the_likeliest(self, p, q, draft, position, start):
    """Whatever the temperature."""
    if draft is not None and int(p.argmax()) == draft:
        return draft, True
    return _RIGHT(self, p, q, draft, position, start)
