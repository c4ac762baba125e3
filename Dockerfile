# JupyterLab with Rankscope, and the tutorials. In a checkout:
#     docker build -t rankscope .
#     docker run --init --rm -it -p 127.0.0.1:8888:8888 rankscope
# then open the address with the token that it prints. --init reaps what a kernel that
# was killed has left.
FROM python:3.12-slim

# The tutorial on backends compiles one.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 person \
    && install -d -o person -g person /home/person/rankscope
WORKDIR /home/person/rankscope
COPY --chown=person . .
RUN pip install --no-cache-dir '.[attach,metrics,mpi,top,ucx]' jupyterlab \
    matplotlib pybind11 scipy setuptools

USER person
EXPOSE 8888
# The address that it prints would be that of the empty launcher with the file as argument.
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", \
     "--LabApp.default_url=/lab/tree/notebooks/01_quickstart.ipynb"]
