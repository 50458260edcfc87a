// Replays prepared calls of a layer on a processor without Python code.
//
// A replay has an entry per prepared call. An entry names everything that the call depends on: entries of dictionaries,
// which must be the same objects, and the types, shapes and state of tensors. A call that matches allocates its outputs
// and launches. For any other call, the replay returns None, and the caller takes the usual path.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Parallel.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <list>
#include <memory>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = c10::SmallVector<Tensor, 8>;
using Words = c10::SmallVector<int64_t, 48>;

constexpr size_t MOST_ENTRIES = 8;  // per layer
constexpr int MOST_LATE = 16;       // late launches, minus others, until threads are timed again: as in threads.py
constexpr size_t LINE_BYTES = 256;  // alignment of scratch memory, as in launches.py
constexpr size_t HUGE_BYTES = 4 << 20;  // arrays from this size on lie in huge pages: as in devices/base.py

PyObject* parameter_class = nullptr;  // torch.nn.Parameter

// ---- references to Python objects, which may be released without the GIL

class Object {
  public:
    explicit Object(PyObject* object = nullptr) : object_(object) { Py_XINCREF(object); }
    Object(Object&& other) noexcept : object_(other.object_) { other.object_ = nullptr; }
    Object(const Object&) = delete;
    Object& operator=(const Object&) = delete;
    ~Object() {
        if (!object_ || !Py_IsInitialized()) return;
        const PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(object_);
        PyGILState_Release(state);
    }
    PyObject* get() const { return object_; }

  private:
    PyObject* object_;
};

// ---- what a call depends on

struct Fact {  // entry of a dictionary, which is the layer's own if it is null; null value: there is no entry
    Object dict, key, value;
    bool holds(PyObject* own) const {
        return PyDict_GetItemWithError(dict.get() ? dict.get() : own, key.get()) == value.get();
    }
};

int64_t address(const Tensor& tensor) { return tensor.defined() ? (int64_t)tensor.const_data_ptr() : 0; }

// Allocate an uninitialised array; a large one lies in huge pages, as `use_huge_pages` of devices/base.py explains.
Tensor new_array(at::IntArrayRef sizes, const Tensor& like) {
    Tensor array = at::empty(sizes, like.options());
#ifdef MADV_HUGEPAGE
    if (array.nbytes() >= HUGE_BYTES) {
        const auto begin = (uintptr_t)array.data_ptr(), page = (uintptr_t)getpagesize();
        const uintptr_t first = (begin + page - 1) / page * page;
        madvise((void*)first, begin + array.nbytes() - first, MADV_HUGEPAGE);
    }
#endif
    return array;
}

struct Form {  // of a contiguous tensor on the processor
    explicit Form(const Tensor& like)
        : sizes(like.sizes().vec()), dtype(like.scalar_type()), requires_grad(like.requires_grad()) {}

    bool fits(const Tensor& tensor) const {
        static const uint64_t usual = c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                                           c10::DispatchKey::ADInplaceOrView,
                                                           c10::DispatchKey::AutocastCPU}).raw_repr();
        if (tensor.key_set().raw_repr() & ~usual || tensor.scalar_type() != dtype) return false;
        return tensor.sizes() == at::IntArrayRef(sizes);
    }
    bool fits_in_place(const Tensor& tensor) const {
        if (!fits(tensor) || !tensor.is_contiguous()) return false;
        const auto address = (uintptr_t)tensor.const_data_ptr();
        return address && address % tensor.itemsize() == 0;
    }

    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    bool requires_grad;
};

struct Parameter {
    Object dict, key;
    Form form;
};

struct Pinned {  // weights whose packed form a call uses
    Object tensor;
    Form form;
    int64_t at;
    int64_t version;  // -1: not counted

    bool is_unchanged() const {
        const Tensor& now = THPVariable_Unpack(tensor.get());
        return form.fits_in_place(now) && address(now) == at &&
               (version < 0 || (int64_t)now._version() == version);
    }
};

bool is_plain(PyObject* object) {
    return (PyObject*)Py_TYPE(object) == THPVariableClass || (PyObject*)Py_TYPE(object) == parameter_class;
}

// Whether no trace, mode, transform or autocast is active.
bool is_direct() {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    return !(local.included_.raw_repr() & ~c10::default_included_set.raw_repr()) &&
           !c10::impl::TorchDispatchModeTLS::stack_len() && local.excluded_.has(c10::DispatchKey::AutocastCPU);
}

// ---- launches

struct Memory {
    char* at = nullptr;
    size_t bytes = 0;
    ~Memory() { std::free(at); }
};

// Scratch memory that the thread keeps, as fresh pages cost more than a small product.
char* scratch(size_t bytes) {
    static thread_local Memory memory;
    if (memory.bytes < bytes) {
        std::free(memory.at);
        bytes = (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
        memory.at = (char*)std::aligned_alloc(LINE_BYTES, bytes);
        memory.bytes = memory.at ? bytes : 0;
        if (!memory.at) throw std::bad_alloc();
    }
    return memory.at;
}

struct Launches {
    void (*launch)(const int64_t*) = nullptr;  // ksgen_launch_all of host_threads.cpp
    int64_t recorded = 0, threads = 1;
    bool has_workspace = false;  // whose address precedes the others
    std::vector<int64_t> offsets;  // of the workspace, and of scratch memory, whose addresses follow the others
    size_t bytes = 0;
    int64_t most_ns = 0;            // launches that take longer are late; 0: none is
    mutable std::atomic<int> late{0};  // late launches, minus others

    // The struct `Repeat` of host_threads.cpp, without addresses.
    Words begin() const {
        Words words{recorded, threads};
        if (has_workspace) words.push_back(0);
        return words;
    }
    void run(Words& words) const {
        if (bytes) {
            const int64_t memory = (int64_t)scratch(bytes);
            for (size_t index = 0; index < offsets.size(); ++index)
                if (index == 0 && has_workspace)
                    words[2] = memory + offsets[index];
                else
                    words.push_back(memory + offsets[index]);
        }
        if (!most_ns) return launch(words.data());
        const auto start = std::chrono::steady_clock::now();
        launch(words.data());
        const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - start;
        late = taken.count() > most_ns ? late + 1 : std::max(0, late - 1);
    }
    bool is_due() const { return late >= MOST_LATE; }  // to be timed again
};

// What a call runs. Training steps keep it until their backward pass, so it must not refer to the layer.
struct Record : torch::CustomClassHolder {
    explicit Record(const Tensor& like) : x(like) {}

    Form x;
    bool is_training = false, has_bias = false, bias_requires_grad = false, is_bsf = true;
    bool sums_bias = false;  // whether the backward launches write the bias's gradient
    bool has_residual = false, residual_requires_grad = false;
    int threads = 1;
    std::vector<Form> read;  // the bias, if there is one, and weights
    std::vector<std::vector<int64_t>> outputs;  // sizes of each output; y is the last one
    std::vector<std::vector<int64_t>> wholes;  // sizes to which weights are repeated, if they are tied; or empty
    std::vector<int64_t> digits, axes;  // sizes of the gradient of y, and their order in the launches; or empty
    Launches forward, backward;
    std::unique_ptr<Object> second, keep;  // computes gradients on the usual path; what the launches need

    Tensor output(size_t index, const Tensor& like) const { return new_array(outputs[index], like); }

    // Append the addresses of x or y, of the bias or 0, and of weights, which have to live until the launches.
    void append(Words& words, at::TensorList given) const {
        words.push_back(address(given[0]));
        if (!has_bias) words.push_back(0);
        for (const Tensor& each : given.slice(1)) words.push_back(address(each));
    }

    // Repeat the tied ones among the weights, which come last.
    Tensors whole(at::TensorList given) const {
        Tensors found(given.begin(), given.end());
        for (size_t index = 0; index < wholes.size(); ++index) {
            Tensor& each = found[found.size() - wholes.size() + index];
            if (!wholes[index].empty()) each = each.expand(wholes[index]).contiguous();
        }
        return found;
    }

    Tensor multiply(const Tensor& given, const Tensor& added, Tensors& read) const {
        Tensor y = output(0, given);
        Words words = forward.begin();
        words.append({address(given), address(added)});
        read.insert(read.begin(), y);
        const Tensors arrays = whole(read);
        append(words, arrays);
        {
            const pybind11::gil_scoped_release released;
            forward.run(words);
        }
        return y;
    }
};

// ---- training steps

// Gradients of x and the weights on the usual path: for second derivatives, batches of gradients and other numbers of
// threads.
variable_list usual_gradients(const Record& record, const variable_list& inputs, const Tensor& gradient) {
    Tensors every{gradient};
    every.append(inputs.begin(), inputs.end());
    const PyGILState_STATE state = PyGILState_Ensure();
    variable_list found;
    PyObject* const given = PyTuple_New((Py_ssize_t)every.size());
    for (size_t index = 0; index < every.size(); ++index) {
        const Tensor& each = every[index];
        PyTuple_SET_ITEM(given, (Py_ssize_t)index, THPVariable_Wrap(each));
    }
    PyObject* const result = PyObject_CallObject(record.second->get(), given);
    Py_DECREF(given);
    if (result) {
        for (Py_ssize_t index = 0; index < PySequence_Size(result); ++index) {
            PyObject* const each = PySequence_GetItem(result, index);
            found.push_back(each == Py_None ? Tensor() : THPVariable_Unpack(each));
            Py_DECREF(each);
        }
        Py_DECREF(result);
    } else {
        python_error error;
        error.persist();  // autograd's engine raises it in the thread that called it
        PyGILState_Release(state);
        throw std::move(error);
    }
    PyGILState_Release(state);
    return found;
}

// A tensor whose memory is the record, because autograd's compiler accepts saved tensors only.
Tensor as_tensor(c10::intrusive_ptr<Record> record) {
    Record* const owned = record.release();
    return at::from_blob(owned, {1}, [owned](void*) { c10::intrusive_ptr<Record>::reclaim(owned); }, at::kByte);
}

struct Step : torch::autograd::Function<Step> {
    // `given`: x, the bias if there is one, the weights, and the residual if there is one.
    static Tensor forward(AutogradContext* context, c10::intrusive_ptr<Record> record, at::TensorList given) {
        const Tensor& x = given[0];
        const size_t count = record->outputs.size();
        const at::TensorList inputs = given.slice(0, given.size() - record->has_residual);
        variable_list saved(inputs.begin(), inputs.end());
        if (record->has_bias) saved.erase(saved.begin() + 1);  // like that of `nn.Linear`, it may be written to
        const Tensors arrays = record->whole(inputs);
        Words words = record->forward.begin();
        record->append(words, arrays);
        Tensor y;
        for (size_t index = 0; index < count; ++index) {
            y = record->output(index, x);
            words.push_back(address(y));
            if (index + 1 < count) saved.push_back(y);
        }
        if (record->has_residual) words.push_back(address(given.back()));
        {
            const pybind11::gil_scoped_release released;
            record->forward.run(words);
        }
        saved.push_back(as_tensor(std::move(record)));
        context->save_for_backward(std::move(saved));
        return y;
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        variable_list saved = context->get_saved_variables();
        const Tensor held = saved.back();
        saved.pop_back();
        const Record& record = *static_cast<const Record*>(held.const_data_ptr());
        const size_t count = record.outputs.size(), inputs = 1 + count, bias = record.has_bias;
        const variable_list given(saved.begin(), saved.begin() + (long)inputs);
        Form form = record.x;
        form.sizes = record.outputs.back();
        bool is_as_given = record.x.fits_in_place(given[0]);  // no assignment to its `data` replaced its memory
        for (size_t index = 0; index < count; ++index)
            is_as_given &= record.read[bias + index].fits_in_place(given[1 + index]);
        variable_list found(inputs);  // of x and the weights
        Tensor of_bias;
        if (at::GradMode::is_enabled() || !is_direct() || !form.fits(gradients[0]) || !is_as_given ||
            at::get_num_threads() != record.threads) {
            found = usual_gradients(record, given, gradients[0]);
        } else {
            const Tensor gradient = gradients[0].contiguous();
            const Tensor in_order =
                record.axes.empty() ? gradient : gradient.view(record.digits).permute(record.axes).contiguous();
            const Tensors arrays = record.whole(given);
            Words words = record.backward.begin();
            words.push_back(address(given[0]));
            for (size_t index = inputs; index < saved.size(); ++index) words.push_back(address(saved[index]));
            for (size_t index = 1; index < inputs; ++index) words.push_back(address(arrays[index]));
            words.push_back(address(in_order));
            for (size_t index = 1; index < inputs; ++index) {
                found[index] = new_array(arrays[index].sizes(), arrays[index]);
                words.push_back(address(found[index]));
            }
            if (record.x.requires_grad) found[0] = new_array(given[0].sizes(), given[0]);
            words.push_back(address(found[0]));
            if (record.sums_bias) of_bias = new_array(record.read[0].sizes, given[0]);
            words.push_back(address(of_bias));
            record.backward.run(words);
            for (size_t index = 1; index < inputs; ++index)
                if (!record.wholes[index - 1].empty()) found[index] = found[index].sum_to_size(given[index].sizes());
        }
        if (record.bias_requires_grad && !of_bias.defined()) {
            const int64_t features = record.read[0].sizes[0];
            const Tensor rows = gradients[0].reshape({record.is_bsf ? -1 : features, record.is_bsf ? features : -1});
            of_bias = rows.sum(record.is_bsf ? 0 : 1);
        }
        found.insert(found.begin(), Tensor());  // the record has none
        if (record.has_bias) found.insert(found.begin() + 2, of_bias);
        if (record.has_residual) found.push_back(record.residual_requires_grad ? gradients[0] : Tensor());
        return found;
    }
};

Tensor step(const c10::intrusive_ptr<Record>& record, const Tensor& x, const Tensor& added,
            at::ArrayRef<Tensor> read) {
    Tensors given{x};
    given.append(read.begin(), read.end());
    if (record->has_residual) given.push_back(added);
    return Step::apply(record, at::TensorList(given));
}

// ---- the module

struct Entry {
    std::vector<Fact> facts;
    std::vector<Parameter> parameters;  // the bias, if there is one, and weights that each call reads
    std::vector<Pinned> pinned;
    std::unique_ptr<Form> residual;
    int64_t calls_left = 0;
    c10::intrusive_ptr<Record> record;

    bool takes(PyObject* own, PyObject* given_x, PyObject* given_residual, Tensors& read) const {
        const bool is_training = record->is_training;
        if (at::GradMode::is_enabled() != is_training || at::get_num_threads() != record->threads) return false;
        if (!is_plain(given_x) || (given_residual == Py_None) == bool(residual)) return false;
        const Tensor& x = THPVariable_Unpack(given_x);
        if (!record->x.fits_in_place(x)) return false;
        if (residual) {
            if (!is_plain(given_residual)) return false;
            const Tensor& added = THPVariable_Unpack(given_residual);
            if (!residual->fits_in_place(added)) return false;
            if (is_training && (added.requires_grad() != residual->requires_grad || added.is_inference())) return false;
        }
        if (is_training && (x.requires_grad() != record->x.requires_grad || x.is_inference())) return false;
        for (const Fact& fact : facts)
            if (!fact.holds(own)) return false;
        for (const Parameter& each : parameters) {
            PyObject* const object = PyDict_GetItemWithError(each.dict.get(), each.key.get());
            if (!object || !is_plain(object)) return false;
            const Tensor& found = THPVariable_Unpack(object);
            if (!each.form.fits_in_place(found)) return false;
            if (is_training && found.requires_grad() != each.form.requires_grad) return false;
            read.push_back(found);
        }
        for (const Pinned& each : pinned)
            if (!each.is_unchanged()) return false;
        return true;
    }
};

struct Replay {
    PyObject_HEAD
    std::list<Entry>* entries;  // the latest first
};

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
    PyObject* const made = type->tp_alloc(type, 0);
    if (made) ((Replay*)made)->entries = new std::list<Entry>;
    return made;
}

// Layers own replays, whose entries refer to dictionaries of the layer.
int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    for (const Entry& entry : *((Replay*)self)->entries) {
        for (const Fact& each : entry.facts) {
            Py_VISIT(each.dict.get());
            Py_VISIT(each.value.get());
        }
        for (const Parameter& each : entry.parameters) Py_VISIT(each.dict.get());
        for (const Pinned& each : entry.pinned) Py_VISIT(each.tensor.get());
    }
    return 0;
}

int clear(PyObject* self) {
    std::list<Entry> dropped;  // its destructors may run Python code that sees this replay
    dropped.swap(*((Replay*)self)->entries);
    return 0;
}

void release(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    delete ((Replay*)self)->entries;
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject* run(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    if (count != 3) return PyErr_Format(PyExc_TypeError, "a replay takes the layer's dictionary, x and the residual");
    PyObject* const own = *arguments++;
    if (!PyDict_Check(own)) return PyErr_Format(PyExc_TypeError, "a replay takes the layer's dictionary");
    if (!is_direct()) Py_RETURN_NONE;
    std::list<Entry>& entries = *((Replay*)self)->entries;
    for (auto place = entries.begin(); place != entries.end(); ++place) {
        Tensors read;
        if (!place->takes(own, arguments[0], arguments[1], read)) {
            if (PyErr_Occurred()) return nullptr;
            continue;
        }
        const c10::intrusive_ptr<Record> record = place->record;  // another thread may remove the entry
        if (record->is_training && at::SavedTensorDefaultHooks::get_hooks(true)) Py_RETURN_NONE;
        if (--place->calls_left < 0 || record->forward.is_due() || record->backward.is_due()) {
            entries.erase(place);
            Py_RETURN_NONE;
        }
        if (place != entries.begin()) entries.splice(entries.begin(), entries, place);
        const Tensor& x = THPVariable_Unpack(arguments[0]);
        const Tensor added = arguments[1] == Py_None ? Tensor() : THPVariable_Unpack(arguments[1]);
        if (record->is_training) return THPVariable_Wrap(step(record, x, added, read));
        return THPVariable_Wrap(record->multiply(x, added, read));
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

Object item(PyObject* tuple, Py_ssize_t index) { return Object(PyTuple_GET_ITEM(tuple, index)); }

std::vector<int64_t> numbers(PyObject* tuple) {
    std::vector<int64_t> found;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(tuple); ++index)
        found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, index)));
    return found;
}

// From (address of the function, address of what was recorded, threads, has_workspace, offsets, bytes, most_ns).
bool read_launches(PyObject* given, Launches& launches) {
    long long function, recorded, threads, bytes, most_ns;
    int has_workspace;
    PyObject* offsets;
    if (!PyArg_ParseTuple(given, "LLLpO!LL", &function, &recorded, &threads, &has_workspace, &PyTuple_Type, &offsets,
                          &bytes, &most_ns))
        return false;
    launches.launch = (void (*)(const int64_t*))function;
    launches.recorded = recorded;
    launches.threads = threads;
    launches.has_workspace = has_workspace;
    launches.offsets = numbers(offsets);
    launches.bytes = (size_t)bytes;
    launches.most_ns = most_ns;
    return !PyErr_Occurred();
}

PyObject* add(PyObject* self, PyObject* arguments) {
    HANDLE_TH_ERRORS
    PyObject *facts, *parameters, *pinned, *x, *residual, *outputs, *launches, *digits, *axes, *second, *keep;
    int is_training, has_bias, sums_bias, is_bsf, threads;
    long long calls;
    if (!PyArg_ParseTuple(arguments, "O!O!O!OOppppiLO!O!O!O!OO", &PyTuple_Type, &facts, &PyTuple_Type, &parameters,
                          &PyTuple_Type, &pinned, &x, &residual, &is_training, &has_bias, &sums_bias, &is_bsf, &threads,
                          &calls, &PyTuple_Type, &outputs, &PyTuple_Type, &launches, &PyTuple_Type, &digits,
                          &PyTuple_Type, &axes, &second, &keep))
        return nullptr;
    Entry entry;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(facts); ++index) {
        PyObject* const each = PyTuple_GET_ITEM(facts, index);
        PyObject* const value = PyTuple_GET_ITEM(each, 2);
        PyObject* const dict = PyTuple_GET_ITEM(each, 0);
        Object of_layer(dict == Py_None ? nullptr : dict), expected(value == Py_Ellipsis ? nullptr : value);
        entry.facts.push_back({std::move(of_layer), item(each, 1), std::move(expected)});
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(parameters); ++index) {
        PyObject* const each = PyTuple_GET_ITEM(parameters, index);
        const Tensor& like = THPVariable_Unpack(PyTuple_GET_ITEM(each, 2));
        entry.parameters.push_back({item(each, 0), item(each, 1), Form(like)});
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(pinned); ++index) {
        PyObject* each;
        long long at, version;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pinned, index), "OLL", &each, &at, &version)) return nullptr;
        entry.pinned.push_back({Object(each), Form(THPVariable_Unpack(each)), at, version});
    }
    if (residual != Py_None) entry.residual = std::make_unique<Form>(THPVariable_Unpack(residual));
    entry.calls_left = calls;
    entry.record = c10::make_intrusive<Record>(THPVariable_Unpack(x));
    Record& record = *entry.record;
    record.is_training = is_training;
    record.has_bias = has_bias;
    record.bias_requires_grad = has_bias && entry.parameters[0].form.requires_grad;
    record.sums_bias = sums_bias;
    record.is_bsf = is_bsf;
    for (const Parameter& each : entry.parameters) record.read.push_back(each.form);
    record.has_residual = bool(entry.residual);
    record.residual_requires_grad = entry.residual && entry.residual->requires_grad;
    record.threads = threads;
    record.digits = numbers(digits);
    record.axes = numbers(axes);
    for (Py_ssize_t index = has_bias; index < PyTuple_GET_SIZE(parameters); ++index)
        record.wholes.push_back(numbers(PyTuple_GET_ITEM(PyTuple_GET_ITEM(parameters, index), 3)));
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(outputs); ++index)
        record.outputs.push_back(numbers(PyTuple_GET_ITEM(outputs, index)));
    if (!read_launches(PyTuple_GET_ITEM(launches, 0), record.forward)) return nullptr;
    if (is_training && !read_launches(PyTuple_GET_ITEM(launches, 1), record.backward)) return nullptr;
    record.second = std::make_unique<Object>(second);
    record.keep = std::make_unique<Object>(keep);
    if (PyErr_Occurred()) return nullptr;
    std::list<Entry>& entries = *((Replay*)self)->entries;
    entries.push_front(std::move(entry));
    if (entries.size() > MOST_ENTRIES) entries.pop_back();
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// Copies and pickles of a replay are None.
PyObject* reduce(PyObject*, PyObject*) { return Py_BuildValue("O()", (PyObject*)Py_TYPE(Py_None)); }

PyMethodDef methods[] = {
    {"__reduce__", reduce, METH_NOARGS, nullptr},
    {"run", (PyCFunction)(void*)run, METH_FASTCALL, "Result of a call; None if no entry takes it."},
    {"add", add, METH_VARARGS, "Add an entry; see ksgen/torch/operators/replay.py."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots[] = {{Py_tp_new, (void*)make},
                       {Py_tp_traverse, (void*)traverse},
                       {Py_tp_clear, (void*)clear},
                       {Py_tp_dealloc, (void*)release},
                       {Py_tp_methods, methods},
                       {0, nullptr}};
PyType_Spec type = {"ksgen_replay.Replay", sizeof(Replay), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "ksgen_replay", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_ksgen_replay(void) {
    PyObject* const nn = PyImport_ImportModule("torch.nn");
    parameter_class = nn ? PyObject_GetAttrString(nn, "Parameter") : nullptr;
    Py_XDECREF(nn);
    PyObject* const found = parameter_class ? PyModule_Create(&module) : nullptr;
    PyObject* const replay = found ? PyType_FromSpec(&type) : nullptr;
    if (!replay || PyModule_AddObject(found, "Replay", replay)) return nullptr;
    return found;
}
