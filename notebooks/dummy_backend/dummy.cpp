// The C++ half of the `dummy` backend: a thread that fills arrays with zeros.
//
// It moves no data between ranks. What it has is everything around the moving:
// a queue, a thread of its own that runs without Python's GIL, truthful reports
// of each start and end, an abort that stops in the middle of an operation, and
// an orderly end.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace py = pybind11;

namespace {

// One operation. The worker writes to it, its Work looks at it.
struct Op {
    py::object work;                       // the rankscope.Work it reports to
    std::vector<py::buffer_info> outputs;  // each keeps its array alive, in place
    std::size_t bytes = 0;
    std::atomic<std::size_t> bytes_done{0};

    // The Work holds the Op and the Op the Work: cut that circle. Needs the GIL.
    void release() {
        outputs.clear();
        work = py::object();
    }
};

class Worker {
  public:
    explicit Worker(double bytes_per_second)
        : state_(std::make_shared<State>(bytes_per_second)),
          thread_([state = state_] { state->run(); }) {}

    ~Worker() {
        py::gil_scoped_release unlocked;  // the thread may need the GIL to end
        close();
    }

    std::shared_ptr<Op> submit(py::object work, py::iterable outputs) {
        auto op = std::make_shared<Op>();
        op->work = std::move(work);
        for (py::handle output : outputs) {
            op->outputs.push_back(output.cast<py::buffer>().request(/*writable=*/true));
            op->bytes += op->outputs.back().size * op->outputs.back().itemsize;
        }
        std::lock_guard guard(state_->mutex);
        if (state_->stop) throw std::runtime_error("the worker was stopped");
        state_->queue.push_back(op);
        state_->wake.notify_one();
        return op;
    }

    // When it returns, no array is written to any more.
    void abort() {
        std::lock_guard guard(state_->mutex);
        state_->stop = true;
        state_->wake.notify_one();
    }

    // The same, and the thread is gone. Called without the GIL.
    void close() {
        abort();
        if (!thread_.joinable()) return;
        // A callback of a Work may drop the last reference on the thread itself.
        if (thread_.get_id() == std::this_thread::get_id()) thread_.detach();
        else thread_.join();
    }

  private:
    // Shared with the thread, which may outlive the Worker by a moment.
    struct State {
        static constexpr std::size_t chunk = 1 << 16;

        explicit State(double bytes_per_second) : pace(bytes_per_second) {}

        const double pace;  // how slow a network to play; infinity: none
        std::mutex mutex;   // guards what follows, and is held while bytes are written
        std::condition_variable wake;
        std::deque<std::shared_ptr<Op>> queue;
        bool stop = false;

        void run() {
            std::unique_lock lock(mutex);
            for (;;) {
                wake.wait(lock, [this] { return stop || !queue.empty(); });
                if (stop) break;
                auto op = std::move(queue.front());
                queue.pop_front();
                // Never wait for the GIL with the mutex held: submit() does it
                // the other way round.
                lock.unlock();
                report([&] { op->work.attr("mark_started")(); });
                lock.lock();
                const bool done = fill(*op, lock);
                const auto ended = std::chrono::system_clock::now().time_since_epoch();
                lock.unlock();
                report([&] {
                    // An aborted Work has been ended by whoever aborted it.
                    if (done) {
                        const auto ns = std::chrono::nanoseconds(ended).count();
                        op->work.attr("mark_completed")(py::none(), 0, ns);
                    }
                    op->release();
                });
                lock.lock();
            }
            lock.unlock();
            report([this] {
                for (auto &op : queue) op->release();
            });
        }

        // Zero the op's outputs chunk by chunk; false if stopped in between.
        bool fill(Op &op, std::unique_lock<std::mutex> &lock) {
            for (auto &output : op.outputs) {
                auto *start = static_cast<char *>(output.ptr);
                const std::size_t size = output.size * output.itemsize;
                for (std::size_t at = 0; at < size; at += chunk) {
                    const std::size_t n = std::min(chunk, size - at);
                    const std::chrono::duration<double> pause(n / pace);
                    if (wake.wait_for(lock, pause, [this] { return stop; })) return false;
                    std::memset(start + at, 0, n);
                    op.bytes_done += n;
                }
            }
            return true;
        }

        // Run `say` with the GIL; a callback of a Work that raises is no end.
        template <typename Say> void report(Say say) {
            py::gil_scoped_acquire locked;
            try {
                say();
            } catch (py::error_already_set &error) {
                error.discard_as_unraisable("the worker of the dummy backend");
            }
        }
    };

    std::shared_ptr<State> state_;
    std::thread thread_;
};

}  // namespace

PYBIND11_MODULE(_rankscope_dummy, module) {
    py::class_<Op, std::shared_ptr<Op>>(module, "Op")
        .def_readonly("bytes", &Op::bytes)
        .def_property_readonly("bytes_done", [](const Op &op) { return op.bytes_done.load(); });
    py::class_<Worker>(module, "Worker")
        .def(py::init<double>())
        .def("submit", &Worker::submit)
        .def("abort", &Worker::abort, py::call_guard<py::gil_scoped_release>())
        .def("close", &Worker::close, py::call_guard<py::gil_scoped_release>());
}
