// What a refusal says.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "verkv/core/error.hpp"

namespace support {

/// Message of the verkv error of type E that f throws; empty where it throws none.
template <class E = verkv::invalid_argument, class F>
std::string message_of(F&& f) {
    try {
        std::forward<F>(f)();
    } catch (const E& e) {
        return e.what();
    }
    return {};
}

/// Whether f throws E, with all of the parts in its message.
template <class E = verkv::invalid_argument, class F>
bool refused(F&& f, std::initializer_list<std::string> parts) {
    const std::string message = message_of<E>(std::forward<F>(f));
    for (const std::string& part : parts) {
        if (message.find(part) == std::string::npos) {
            return false;
        }
    }
    return !message.empty();
}

}  // namespace support
