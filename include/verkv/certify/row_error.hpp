// What is still promised where the rows that are used are not quite those that were certified.
#pragma once

#include <cmath>

#include "verkv/core/error.hpp"

namespace verkv::inline v0 {

/// How far the rows that attention reads may be from the exact ones: quantised, or rebuilt from fewer numbers.
struct row_error {
    double logit = 0;  ///< b: no logit of a row that is used is off by more
    double value = 0;  ///< eta: no value of a row that is used is off by more, in length

    friend bool operator==(const row_error&, const row_error&) = default;
};

/// Checks a row error. Throws invalid_argument for a negative number, NaN or infinity.
inline void validate(const row_error& e) {
    detail::check(e.logit >= 0 && std::isfinite(e.logit) && e.value >= 0 && std::isfinite(e.value), "rows are off by ",
                  e.logit, " in the logit and ", e.value, " in the value; these must be finite and not negative");
}

/// The relative error that a denominator certified to epsilon keeps with approximate rows: e^b (1 + epsilon) - 1.
///
/// Proof. Let c_i >= 0 be what the plan counts token i with (lambda Z' / r'), D^ = sum c_i w_i with exact weights, and
/// D~ = sum c_i w_i e^{d_i}, |d_i| <= b, what attention finds. Then e^-b D^ <= D~ <= e^b D^. Where |D^ - D| <= epsilon
/// D, which fails with probability delta at most, D~ <= e^b (1 + epsilon) D and D~ >= e^-b (1 - epsilon) D. The second
/// is not further from D than the first: e^b + e^-b >= 2 and epsilon e^b >= epsilon e^-b. QED
///
/// Nothing is asked of the d_i but their size: they may depend on who was drawn, so exact and approximate rows may be
/// used side by side. The certificate is that of the exact weights. One that was made from approximate weights, for all
/// tokens within e^+-b of the exact ones, is one of e^{2b} epsilon for those: a tail's bound grows with the masses and
/// in proportion to them, and D is at least e^-b times their sum. Equality is reached: all d_i = b, and D^ = (1 +
/// epsilon) D. In double; about 2^-50 relative, not rounded up. Throws invalid_argument for an epsilon that is negative
/// or not finite, and as validate(error) does.
[[nodiscard]] inline double promised_epsilon(double epsilon, const row_error& error) {
    validate(error);
    detail::check(epsilon >= 0 && std::isfinite(epsilon), "epsilon is ", epsilon,
                  "; it must be a finite number that is not negative");
    return std::expm1(error.logit) + std::exp(error.logit) * epsilon;
}

/// The error, in units of `reference`, that an output certified to epsilon * reference keeps with approximate rows:
/// epsilon + (tanh(b / 2) spread + eta) / reference.
/// reference: what the certificate is relative to, ||o|| or a value scale, > 0. spread: the largest ||v_i - v_j|| of
/// two rows that are used, exact values; twice the largest radius ||v_i - c|| about any c will do.
///
/// Proof. Let p_i = c_i w_i / D^ and p~_i = c_i w_i e^{d_i} / D~, which sum to 1, v~_i the values that are read, and o^
/// = sum p_i v_i. Then o~ - o^ = sum p~_i (v~_i - v_i) + sum (p~_i - p_i) v_i. The first sum is a mean of vectors no
/// longer than eta. In the second, p~ - p = T (mu - nu) with distributions mu and nu and T = sum (p~_i - p_i)_+, so its
/// length is at most T spread. Let A be the tokens with p~ > p and a = p(A). T = p~(A) - a grows with d_i on A and
/// falls with it elsewhere: T <= a e^b / (a e^b + (1 - a) e^-b) - a. This is largest where a = 1 / (1 + e^b): (e^b - 1)
/// / (e^b + 1) = tanh(b / 2). With ||o^ - o|| <= epsilon reference the triangle inequality gives the rest. QED
///
/// As for denominators, nothing is asked of d_i and v~_i but their size. Equality is reached in the second sum: two
/// tokens, p = (1 / (1 + e^b), e^b / (1 + e^b)), d = (b, -b). In double; about 2^-50 relative, not rounded up.
/// Throws invalid_argument for a reference that is not positive and finite, a spread or epsilon that is negative or not
/// finite, and as validate(error) does.
[[nodiscard]] inline double promised_output_epsilon(double epsilon, const row_error& error, double spread,
                                                    double reference) {
    validate(error);
    detail::check(epsilon >= 0 && std::isfinite(epsilon), "epsilon is ", epsilon,
                  "; it must be a finite number that is not negative");
    detail::check(spread >= 0 && std::isfinite(spread), "values are apart by ", spread,
                  "; this must be finite and not negative");
    detail::check(reference > 0 && std::isfinite(reference), "an output is measured against ", reference,
                  "; it must be a positive number");
    return epsilon + (std::tanh(error.logit / 2) * spread + error.value) / reference;
}

/// The epsilon to certify a denominator to, so that `promised` is kept with approximate rows: promised_epsilon() the
/// other way round, (1 + promised) e^-b - 1.
/// Throws invalid_argument, with both numbers, where rows alone are off by as much (e^b - 1 >= promised), and as
/// promised_epsilon() does.
[[nodiscard]] inline double epsilon_to_certify(double promised, const row_error& error) {
    const double alone = promised_epsilon(0, error);
    detail::check(promised > alone && std::isfinite(promised), "an error of ", promised,
                  " is to be kept by rows that alone may cost ", alone);
    return std::expm1(-error.logit) + std::exp(-error.logit) * promised;
}

/// The epsilon to certify an output to, so that `promised` is kept with approximate rows: promised_output_epsilon() the
/// other way round.
/// Throws invalid_argument, with both numbers, where rows alone are off by as much, and as promised_output_epsilon()
/// does.
[[nodiscard]] inline double output_epsilon_to_certify(double promised, const row_error& error, double spread,
                                                      double reference) {
    const double alone = promised_output_epsilon(0, error, spread, reference);
    detail::check(promised > alone && std::isfinite(promised), "an error of ", promised,
                  " is to be kept by rows that alone may cost ", alone);
    return promised - alone;
}

}  // namespace verkv::inline v0
