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


def fast_sum(a, b):
    """two_sum where a is not smaller."""
    total = nl.add(a, b)
    return total, nl.subtract(b, nl.subtract(total, a))


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


def multiply_pairs(a, b):
    """The product of two pairs."""
    high, low = two_product(a[0], b[0])
    return high, nl.add(low, nl.add(nl.multiply(a[0], b[1]), nl.multiply(a[1], b[0])))


def add_multiple(e, exact, rest, tiny, b):
    """e * (exact + rest + tiny) + b, a pair, for integers e of a few bits, of which e * exact has no rounding error."""
    high, low = two_product(e, nl.full(e.shape, rest, dtype=nl.float32))
    first, first_low = two_sum(nl.multiply(e, exact), high)
    total, total_low = two_sum(first, b[0])
    lows = nl.add(nl.add(low, nl.multiply(e, tiny)), b[1])
    return nl.add(total, nl.add(nl.add(total_low, first_low), lows))


def polynomial(coefficients, x):
    """c[0] x^(n-1) + ... + c[n-1], each step rounded."""
    value = nl.full(x.shape, coefficients[0], dtype=nl.float32)
    for c in coefficients[1:]:
        value = nl.add(nl.multiply(value, x), c)
    return value


def expm1(x):
    """e^x - 1."""
    limited = nl.minimum(89.0, nl.maximum(-20.0, x))
    n = nl.subtract(nl.add(nl.multiply(limited, 1.44269504), 12582912.0), 12582912.0)  # nearest integers
    # r = x - n log(2), in pairs.
    far, far_low = two_product(n, nl.full(x.shape, -2.1219444e-4, dtype=nl.float32))
    near, near_low = two_sum(nl.subtract(limited, nl.multiply(n, 0.693359375)), nl.negative(far))
    r = near, nl.subtract(near_low, nl.add(far_low, nl.multiply(n, 1.646595e-12)))
    # e^r - 1 = r + r^2 * (1 / 2 + r * (1 / 6 + r * (1 / 24 + ...)))
    terms = (2.7557319e-6, 2.4801588e-5, 1.984127e-4, 0.0013888889, 0.0083333338, 0.041666668)
    sixth, sixth_low = fast_sum(0.16666667, nl.multiply(polynomial(terms, r[0]), r[0]))
    u = multiply_pairs((sixth, nl.subtract(sixth_low, 4.967054e-9)), r)
    v, v_low = fast_sum(0.5, u[0])
    w = multiply_pairs((v, nl.add(v_low, u[1])), multiply_pairs(r, r))
    high, low = fast_sum(r[0], w[0])
    # 2^(n - 1), as 2^n may be beyond fp32's range
    half = nl.left_shift(nl.copy(nl.add(n, 126.0), dtype=nl.int32), 23).view(nl.float32)
    less_one, less_one_low = two_sum(half, -0.5)
    y, y_low = two_sum(less_one, nl.multiply(half, high))
    lows = nl.add(nl.add(y_low, less_one_low), nl.multiply(half, nl.add(low, nl.add(r[1], w[1]))))
    y = nl.multiply(nl.add(y, lows), 2.0)
    small = copysign(nl.add(x, nl.multiply(nl.multiply(x, 0.5), x)), x)
    return nl.where(nl.less(nl.abs(x), 1e-5), small, nl.where(nl.equal(x, x), y, x))


def log_parts(x, low):
    """log(x + low) = exponent * log(2) + rest, for positive normal x."""
    bits = nl.subtract(x.view(nl.int32), nl.full(x.shape, 0x3F3504F3, dtype=nl.int32))
    biased = nl.add(bits, nl.full(x.shape, 0x3F800000, dtype=nl.int32))
    exponent = nl.subtract(nl.copy(nl.right_shift(biased, 23), dtype=nl.float32), 127.0)
    mantissa = nl.add(nl.bitwise_and(bits, 0x007FFFFF), nl.full(x.shape, 0x3F3504F3, dtype=nl.int32))
    f = nl.subtract(mantissa.view(nl.float32), 1.0)
    shift = nl.copy(nl.subtract(127.0, nl.minimum(exponent, 127.0)), dtype=nl.int32)
    low = nl.multiply(low, nl.left_shift(shift, 23).view(nl.float32))  # times 2^-exponent
    # log(1 + f) = 2 artanh(z), z = f / (2 + f)
    d, d_low = fast_sum(2.0, f)
    inverse = nl.reciprocal(d)
    q = nl.multiply(f, inverse)
    p, p_low = two_product(q, d)
    rest = nl.add(nl.subtract(nl.subtract(f, p), p_low), nl.subtract(low, nl.multiply(q, nl.add(d_low, low))))
    z = q, nl.multiply(rest, inverse)
    u = multiply_pairs(z, z)
    terms = (0.15384616, 0.18181819, 0.22222222, 0.2857143, 0.4)
    third, third_low = fast_sum(0.6666667, nl.multiply(polynomial(terms, u[0]), u[0]))
    tail = multiply_pairs(multiply_pairs(z, u), (third, nl.subtract(third_low, 1.9868216e-8)))
    high, high_low = fast_sum(nl.multiply(z[0], 2.0), tail[0])
    return exponent, (high, nl.add(high_low, nl.add(nl.multiply(z[1], 2.0), tail[1])))


def log_edges(x, y):
    """What a logarithm gives for 0, for infinity, and where there is none; y else."""
    none = nl.full(x.shape, float("nan"), dtype=nl.float32)
    finite = nl.where(nl.less(x, float("inf")), y, x)
    return nl.where(nl.greater(x, 0.0), finite, nl.where(nl.equal(x, 0.0), float("-inf"), none))


def log1p(x):
    """log(1 + x)."""
    exponent, rest = log_parts(*two_sum(1.0, x))
    y = add_multiple(exponent, 0.693359375, -2.1219444e-4, 1.646595e-12, rest)
    small = copysign(nl.subtract(x, nl.multiply(nl.multiply(x, 0.5), x)), x)
    return nl.where(nl.less(nl.abs(x), 1e-5), small, log_edges(nl.add(x, 1.0), y))


def log_parts_of_any(x):
    """log_parts, of subnormal x, too."""
    tiny = nl.less(x, 1.17549435e-38)
    normal = nl.where(tiny, nl.multiply(x, 8388608.0), x)
    exponent, rest = log_parts(normal, nl.full(x.shape, 0.0, dtype=nl.float32))
    return nl.subtract(exponent, nl.multiply(tiny, 23.0)), rest


def log2(x):
    """The logarithm to base 2."""
    exponent, rest = log_parts_of_any(x)
    rest = multiply_pairs(rest, (nl.full(x.shape, 1.442695, dtype=nl.float32), 1.925963e-8))
    high, low = two_sum(exponent, rest[0])
    return log_edges(x, nl.add(high, nl.add(low, rest[1])))


def log10(x):
    """The logarithm to base 10."""
    exponent, rest = log_parts_of_any(x)
    rest = multiply_pairs(rest, (nl.full(x.shape, 0.4342945, dtype=nl.float32), -1.010305e-8))
    return log_edges(x, add_multiple(exponent, 0.30078125, 2.4874567e-4, -1.9043129e-12, rest))


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
