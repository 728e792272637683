"""Functions that printed programs may need beside those of `nl`: a printed file holds the text of those that it calls.

Each gives the bits of a lane operation (csrc/core/lane_ops.h) from instructions of the public ISA. Integers are exact
on tiles of 32 bits, whose sums and products wrap; a tile and a number meet in fp32.
"""

import nki.isa as nisa
import nki.language as nl


def copysign(a, b):
    """The magnitude of a with the sign of b."""
    magnitude = nl.bitwise_and(a.view(nl.int32), 0x7FFFFFFF)
    sign = nl.bitwise_and(b.view(nl.int32), -(2**31))
    return nl.bitwise_or(magnitude, sign).view(nl.float32)


def other_if_nan(op, a, b):
    """op(a, b), a maximum or minimum; the other one if one is NaN."""
    numbers = nl.where(nl.equal(a, a), op(a, b), b)
    return nl.where(nl.equal(b, b), numbers, a)


def round_half_even(x):
    """The nearest integer: from 2^23 on there is no room for a fraction."""
    size = nl.abs(x)
    near = nl.subtract(nl.add(size, 2.0**23), 2.0**23)
    return copysign(nl.where(nl.less(size, 2.0**23), near, size), x)


def floor_divide(a, b):
    """The floor of a / b as Python rounds it: the quotient of what is left without the remainder."""
    rest, ratio = nl.fmod(a, b), nl.divide(a, b)
    signs_differ = nl.logical_xor(nl.less(b, 0.0), nl.less(rest, 0.0))
    less_one = nl.logical_and(nl.not_equal(rest, 0.0), signs_differ)
    quotient = nl.subtract(nl.divide(nl.subtract(a, rest), b), less_one)
    below = nl.floor(quotient)
    near = nl.where(nl.greater(nl.subtract(quotient, below), 0.5), nl.add(below, 1.0), below)
    zero = copysign(nl.full(ratio.shape, 0.0, dtype=nl.float32), ratio)
    return nl.where(nl.equal(b, 0.0), ratio, nl.where(nl.equal(quotient, 0.0), zero, near))


def to_int(x):
    """The integer part; the least integer for NaN and what is out of range."""
    inside = nl.logical_and(nl.greater_equal(x, -(2.0**31)), nl.less(x, 2.0**31))
    least = nl.full(x.shape, -(2**31), dtype=nl.int32)
    return nl.where(inside, nl.copy(nl.trunc(x), dtype=nl.int32), least)


def two_sum(a, b):
    """a + b and its rounding error: numbers in pairs have twice the digits."""
    total = nl.add(a, b)
    part = nl.subtract(total, a)
    return total, nl.add(nl.subtract(a, nl.subtract(total, part)), nl.subtract(b, part))


def two_product(a, b):
    """a * b and its rounding error, from products of halves, which have none."""

    def halves(x):
        shifted = nl.multiply(x, 4097.0)
        high = nl.subtract(shifted, nl.subtract(shifted, x))
        return high, nl.subtract(x, high)

    product = nl.multiply(a, b)
    (a_high, a_low), (b_high, b_low) = halves(a), halves(b)
    error = nl.subtract(nl.multiply(a_high, b_high), product)
    error = nl.add(nl.add(error, nl.multiply(a_high, b_low)), nl.multiply(a_low, b_high))
    return product, nl.add(error, nl.multiply(a_low, b_low))


def polynomial(coefficients, x):
    """c[0] x^(n-1) + ... + c[n-1], each step rounded."""
    value = nl.full(x.shape, coefficients[0], dtype=nl.float32)
    for c in coefficients[1:]:
        value = nl.add(nl.multiply(value, x), c)
    return value


def expm1(x):
    """e^x - 1."""
    terms = (2.4821235e-5, 2.0093776e-4, 0.0013889929, 0.008332652, 0.04166664, 0.16666672, 0.5)
    near = nl.add(x, nl.multiply(x, nl.multiply(polynomial(terms, x), x)))
    return nl.where(nl.less(nl.abs(x), 0.7), copysign(near, x), nl.subtract(nl.exp(x), 1.0))


def log1p(x):
    """log(1 + x): the logarithm of what 1 + x is rounded to, and its slope times the rounding error."""
    near, low = two_sum(1.0, x)
    log = nl.log(near)
    y = nl.add(log, nl.multiply(low, nl.reciprocal(near)))
    return copysign(nl.where(nl.less(nl.abs(log), float("inf")), y, log), x)


def log_parts(x):
    """x = 2^exponent * m: the exponent, and the logarithm of m, which is from sqrt(1/2) to sqrt(2)."""
    tiny = nl.less(x, 1.17549435e-38)
    normal = nl.where(tiny, nl.multiply(x, 8388608.0), x)
    bits = nl.subtract(normal.view(nl.int32), nl.full(x.shape, 0x3F3504F3, dtype=nl.int32))
    biased = nl.add(bits, nl.full(x.shape, 0x3F800000, dtype=nl.int32))
    exponent = nl.subtract(nl.copy(nl.right_shift(biased, 23), dtype=nl.float32), 127.0)
    m = nl.add(nl.bitwise_and(bits, 0x007FFFFF), nl.full(x.shape, 0x3F3504F3, dtype=nl.int32))
    return nl.subtract(exponent, nl.multiply(tiny, 23.0)), nl.log(m.view(nl.float32))


def log_edges(x, y):
    """What a logarithm gives for 0, for infinity, and where there is none; y else."""
    none = nl.full(x.shape, float("nan"), dtype=nl.float32)
    finite = nl.where(nl.less(x, float("inf")), y, x)
    return nl.where(nl.greater(x, 0.0), finite, nl.where(nl.equal(x, 0.0), float("-inf"), none))


def log2(x):
    """The logarithm to base 2."""
    exponent, rest = log_parts(x)
    return log_edges(x, nl.add(exponent, nl.add(nl.multiply(rest, 1.442695), nl.multiply(rest, 1.925963e-8))))


def log10(x):
    """The logarithm to base 10."""
    exponent, rest = log_parts(x)
    rest = nl.add(nl.multiply(rest, 0.4342945), nl.multiply(rest, -1.010305e-8))
    rest = nl.add(nl.multiply(exponent, 2.4874567e-4), rest)
    return log_edges(x, nl.add(nl.multiply(exponent, 0.30078125), rest))


def erfc(x):
    """1 - erf(x): from 1/4 on e^-(x^2), x^2 in a pair, times a polynomial in 1 / (x + 3/2)."""
    a = nl.minimum(10.1, nl.maximum(0.25, x))
    t = nl.reciprocal(nl.add(a, 1.5))
    terms = (
        4.8071823,
        -10.670567,
        5.0545044,
        5.95647,
        -6.7439833,
        0.82956904,
        0.40624207,
        1.0099473,
        0.8450653,
        0.5642171,
    )
    r = nl.multiply(polynomial(terms, t), t)
    square, square_low = two_product(a, a)
    small = nl.greater(a, 8.0)  # e^-(x^2) is, and is scaled by e^32
    e = nl.exp(nl.subtract(nl.where(small, 32.0, 0.0), square))
    far = nl.multiply(nl.subtract(r, nl.multiply(r, square_low)), e)
    far = nl.multiply(far, nl.where(small, 1.2664166e-14, 1.0))
    return nl.where(nl.less(x, 0.25), nl.subtract(1.0, nl.erf(x)), far)


def asin_part(a):
    """p: asin(a) is p for a <= 1/2, and pi/2 - 2 p above, where p is the arc sine of sqrt((1 - a) / 2)."""
    above = nl.greater(a, 0.5)
    u = nl.where(above, nl.subtract(0.5, nl.multiply(a, 0.5)), nl.multiply(a, a))
    s = nl.where(above, nl.sqrt(u), a)
    terms = (0.042211797, 0.024152093, 0.04547604, 0.07495252, 0.16666754)
    return nl.add(s, nl.multiply(s, nl.multiply(polynomial(terms, u), u)))


def asin(x):
    """The arc sine."""
    a = nl.abs(x)
    p = asin_part(a)
    far = nl.subtract(1.57079637, nl.add(nl.multiply(p, 2.0), 4.3711388e-8))
    return copysign(nl.where(nl.greater(a, 0.5), far, p), x)


def acos(x):
    """The arc cosine."""
    a = nl.abs(x)
    p = asin_part(a)
    twice = nl.multiply(p, 2.0)
    far = nl.where(nl.greater(x, 0.0), twice, nl.subtract(3.14159274, nl.add(twice, 8.7422777e-8)))
    near = nl.subtract(1.57079637, nl.add(copysign(p, x), 4.3711388e-8))
    return nl.where(nl.greater(a, 0.5), far, near)


def atan2(y, x):
    """The angle of the point (x, y): up to pi/4 an arc tangent, the others by symmetry."""
    a, b = nl.abs(y), nl.abs(x)
    steep = nl.greater(a, b)
    low, high = nl.where(steep, b, a), nl.where(steep, a, b)
    # 0 / 0 is 0 here, and infinity / infinity 1.
    same = nl.where(nl.greater(high, 0.0), 1.0, high)
    p = nl.arctan(nl.where(nl.equal(low, high), same, nl.divide(low, high)))
    left = nl.less(x.view(nl.int32), 0)
    start = nl.where(steep, 1.57079637, nl.where(left, 3.14159274, 0.0))
    back = nl.negative(p)
    turn = nl.where(steep, nl.where(left, p, back), nl.where(left, back, p))
    return copysign(nl.add(start, nl.add(turn, nl.multiply(start, -2.7827534e-8))), y)  # the rest of pi


def sinh(x):
    """The hyperbolic sine; from e^(|x| - 1), which is finite where e^|x| no longer is."""
    a = nl.abs(x)
    u = nl.multiply(a, a)
    e = nl.exp(nl.subtract(a, 1.0))
    terms = (2.782229e-6, 1.9842894e-4, 0.0083333105, 0.16666667)
    small = nl.add(a, nl.multiply(a, nl.multiply(polynomial(terms, u), u)))
    large = nl.subtract(nl.multiply(e, 1.35914091), nl.multiply(nl.reciprocal(e), 0.18393973))
    return copysign(nl.where(nl.less(a, 1.0), small, large), x)


def cosh(x):
    """The hyperbolic cosine."""
    e = nl.exp(nl.subtract(nl.abs(x), 1.0))
    return nl.add(nl.multiply(e, 1.35914091), nl.multiply(nl.reciprocal(e), 0.18393973))


def negate(a):
    """-a of integers."""
    return nl.subtract(nl.full(a.shape, 0, dtype=nl.int32), a)


def divide_integers(a, b):
    """The quotient of integers, rounded to 0, and the remainder: long division of their magnitudes, bit by bit."""
    dividend, divisor = nl.maximum(a, negate(a)), nl.maximum(b, negate(b))
    quotient, rest = nl.full(a.shape, 0, dtype=nl.int32), nl.full(a.shape, 0, dtype=nl.int32)
    for bit in range(31, -1, -1):
        digit = nl.bitwise_and(nl.right_shift(dividend, bit), 1)
        rest = nl.bitwise_or(nl.left_shift(rest, 1), digit)
        fits = nl.greater_equal(rest.view(nl.uint32), divisor.view(nl.uint32)).view(nl.int32)
        rest = nl.subtract(rest, nl.multiply(divisor, fits))
        quotient = nl.bitwise_or(quotient, nl.left_shift(fits, bit))
    signs_differ = nl.less(nl.bitwise_xor(a, b), 0)
    return nl.where(signs_differ, negate(quotient), quotient), nl.where(nl.less(a, 0), negate(rest), rest)


def one_too_high(rest, b):
    """1 where a quotient that was rounded to 0 is not the floor."""
    return nl.logical_and(nl.not_equal(rest, 0), nl.less(nl.bitwise_xor(rest, b), 0))


def floor_divide_integers(a, b):
    """The floor of a / b."""
    quotient, rest = divide_integers(a, b)
    return nl.subtract(quotient, one_too_high(rest, b))


def remainder_integers(a, b):
    """The remainder with the sign of b."""
    _, rest = divide_integers(a, b)
    return nl.where(one_too_high(rest, b), nl.add(rest, b), rest)


def by_pieces(reduce, x):
    """A reduction of long rows: in pieces of 4,096 columns, then the pieces. Sums are defined so."""
    rows, columns = x.shape
    if columns <= 4096:
        return reduce(x, axis=1, keepdims=True)
    parts = nl.ndarray((rows, -(-columns // 4096)), dtype=x.dtype, buffer=nl.sbuf)
    for i in range(parts.shape[1]):
        piece = x[:, 4096 * i : min(columns, 4096 * (i + 1))]
        nisa.tensor_copy(dst=parts[:, i : i + 1], src=reduce(piece, axis=1, keepdims=True))
    return by_pieces(reduce, parts)


def largest(x):
    """The largest integer of each row. Reductions are fp32, which has the halves of an integer exactly."""
    bits = nl.bitwise_xor(x, -(2**31))  # in the order of numbers without signs
    high, low = nl.right_shift(bits, 16), nl.bitwise_and(bits, 0xFFFF)
    high_of_largest = nl.max(high, axis=1, keepdims=True)
    low_of_largest = nl.max(nl.where(nl.equal(high, high_of_largest), low, -1), axis=1, keepdims=True)
    return nl.bitwise_xor(nl.bitwise_or(nl.left_shift(high_of_largest, 16), low_of_largest), -(2**31))


def smallest(x):
    """The smallest integer of each row."""
    return nl.invert(largest(nl.invert(x)))


def either(x):
    """The bits of all elements of each row together."""
    bits = nl.ndarray((x.shape[0], 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=bits, op=nl.bitwise_or, data=x.view(nl.int32), axis=1)
    return bits.view(x.dtype)


def in_column(index, first, shape):
    """1 in the column that `index`, a tile of integers, says. The tile's columns count from `first`."""
    columns = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=columns, pattern=[[1, shape[1]]], offset=first)
    return nl.equal(columns, index)


def gather(x, index, first):
    """The element of each row in the column that `index` says; 0 if there is no such column."""
    bits = nl.where(in_column(index, first, x.shape), x.view(nl.int32), 0)
    return either(bits).view(x.dtype)


def scatter(x, index, first):
    """x in the column that `index` says, 0 in the others."""
    bits = nl.where(in_column(index, first, x.shape), x.view(nl.int32), 0)
    return bits.view(x.dtype)


def add_rows(op, x, sums, row, column):
    """Adds up (op: or finds the largest of) each 32 rows in their order, the first of which is `row`."""
    for first in range(0, x.shape[0], 32):
        total = nl.ndarray((1, x.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_partition_reduce(dst=total, op=op, data=x[first : min(first + 32, x.shape[0])])
        at = (row + first) // 32
        nl.store(sums[at : at + 1, column : column + x.shape[1]], total)


def fold_rows(op, sums):
    """One row of what add_rows gave: 32 rows at a time, until one is left."""
    while sums.shape[0] > 1:
        rows, columns = sums.shape
        folded = nl.ndarray((-(-rows // 32), columns), dtype=nl.float32, buffer=nl.hbm)
        for row in range(0, rows, 32):
            for column in range(0, columns, 2048):
                add_rows(op, nl.load(sums[row : min(row + 32, rows), column : min(column + 2048, columns)]), folded,
                         row, column)  # fmt: skip
        sums = folded
    return sums


def uniform_bits(seed, offset, first, pitch, shape):
    """Random words, Philox 4x32-10: element e has word e % 4 of counter offset + e // 4. Element (p, j) of the tile is
    first + pitch * p + j."""

    def signed(word):
        return (word % 2**32 ^ 2**31) - 2**31

    def all_of(word):
        return nl.full((shape[0], 1), signed(word), dtype=nl.int32).broadcast(1, shape[1])

    def multiply(x, factor):
        """The upper and the lower word of a product, by halves."""
        high, low = nl.right_shift(x, 16), nl.bitwise_and(x, 0xFFFF)
        factor_high, factor_low = all_of(factor >> 16), all_of(factor & 0xFFFF)
        cross, other = nl.multiply(low, factor_high), nl.multiply(high, factor_low)
        middle = nl.add(nl.right_shift(nl.multiply(low, factor_low), 16), nl.bitwise_and(cross, 0xFFFF))
        middle = nl.add(middle, nl.bitwise_and(other, 0xFFFF))
        upper = nl.add(nl.multiply(high, factor_high), nl.right_shift(cross, 16))
        upper = nl.add(nl.add(upper, nl.right_shift(other, 16)), nl.right_shift(middle, 16))
        return upper, nl.multiply(x, all_of(factor))

    element = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=element, pattern=[[1, shape[1]]], offset=first, channel_multiplier=pitch)
    a = nl.add(nl.right_shift(element, 2), all_of(offset[0]))
    carry = nl.less(a.view(nl.uint32), all_of(offset[0]).view(nl.uint32)).view(nl.int32)
    b = nl.add(carry, all_of(offset[1]))
    c, d = nl.full(shape, 0, dtype=nl.int32), nl.full(shape, 0, dtype=nl.int32)
    for r in range(10):
        upper_a, lower_a = multiply(a, 0xD2511F53)
        upper_c, lower_c = multiply(c, 0xCD9E8D57)
        a = nl.bitwise_xor(nl.bitwise_xor(upper_c, b), signed(seed[0] + r * 0x9E3779B9))
        c = nl.bitwise_xor(nl.bitwise_xor(upper_a, d), signed(seed[1] + r * 0xBB67AE85))
        b, d = lower_c, lower_a
    place = nl.bitwise_and(element, 3)
    word = nl.where(nl.equal(place, 0), a, nl.where(nl.equal(place, 1), b, nl.where(nl.equal(place, 2), c, d)))
    return word
